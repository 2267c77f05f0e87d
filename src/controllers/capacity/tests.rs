//! The picture: what is wanted for which class and node.

use std::collections::BTreeMap;
use std::sync::Arc;

use jiff::{SignedDuration, Timestamp};
use serde_json::json;

use super::decide::{Step, Urgency};
use super::index::Index;
use super::object::{Figures, Found, Published, name};
use crate::controllers::class::Class;
use crate::controllers::cluster::{DRIVER, TOPOLOGY_KEY};
use crate::controllers::splitter::NodeRoom;
use crate::domain::pool::PoolView;
use crate::domain::reach::Network;
use crate::domain::{Bytes, NodeName};

fn now() -> Timestamp {
    "2030-01-01T00:00:00Z".parse().unwrap()
}

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

/// A node with pools of these GiB.
fn room(node: &str, pools: &[u64]) -> NodeRoom {
    let view = |(number, gib): (usize, &u64)| -> PoolView {
        let bytes = gib << 30;
        serde_json::from_value(json!({
            "node": node, "name": format!("p{number}"), "total": bytes, "free": bytes, "enforcement": "ProjectQuota",
        }))
        .unwrap()
    };
    NodeRoom { pools: pools.iter().enumerate().map(view).collect(), heartbeat: Some(now()), reach: None }
}

fn class(name: &str, more: serde_json::Value) -> Class {
    let mut parameters = BTreeMap::from([("branchFormat".to_owned(), "directory".to_owned())]);
    parameters.extend(serde_json::from_value::<BTreeMap<String, String>>(more).unwrap());
    let class = json!({"metadata": {"name": name}, "provisioner": DRIVER, "parameters": parameters});
    Class::read(serde_json::from_value(class).unwrap()).unwrap()
}

fn figures(index: &Index, class: &str, on: &str) -> Option<(u64, u64)> {
    let wanted = index.wanted(&name(class, &node(on)))?;
    assert_eq!((&*wanted.class, wanted.node.as_str()), (class, on));
    Some((wanted.figures.capacity.get() >> 30, wanted.figures.maximum.get() >> 30))
}

#[test]
fn each_class_has_the_largest_volume_that_it_can_make_on_each_node() {
    let mut index = Index::default();
    index.put_class(class("many", json!({})), now());
    index.put_class(class("one", json!({"maxBranches": "1"})), now());
    index.put_node(&node("a"), Some(room("a", &[3, 4])), now());
    index.put_node(&node("b"), Some(room("b", &[5])), now());
    assert_eq!(figures(&index, "many", "a"), Some((7, 7)));
    assert_eq!(figures(&index, "one", "a"), Some((7, 4)));
    assert_eq!(figures(&index, "many", "b"), Some((5, 5)));
    index.put_class(class("late", json!({})), now());
    assert_eq!(figures(&index, "late", "a"), Some((7, 7)));
}

#[test]
fn what_goes_takes_its_objects_along_and_no_others() {
    let mut index = Index::default();
    index.put_class(class("x", json!({})), now());
    index.put_class(class("y", json!({})), now());
    for on in ["a", "b"] {
        index.put_node(&node(on), Some(room(on, &[3])), now());
    }
    assert_eq!(index.put_node(&node("a"), None, now()).len(), 2, "the objects to be looked at");
    assert_eq!((figures(&index, "x", "a"), figures(&index, "x", "b")), (None, Some((3, 3))));
    index.remove_class("x", now());
    assert_eq!((figures(&index, "x", "b"), figures(&index, "y", "b")), (None, Some((3, 3))));
    index.put_node(&node("b"), Some(room("b", &[])), now());
    assert_eq!(figures(&index, "y", "b"), None, "no pools");
}

#[test]
fn a_node_whose_agent_is_silent_has_nothing_until_it_speaks_again() {
    let mut index = Index::default();
    index.put_class(class("x", json!({})), now());
    index.put_node(&node("a"), Some(room("a", &[3])), now());
    let later = now() + SignedDuration::from_mins(16);
    index.refresh_node(&node("a"), later);
    assert_eq!(figures(&index, "x", "a"), Some((0, 0)));
    let again = NodeRoom { heartbeat: Some(later), ..room("a", &[3]) };
    index.put_node(&node("a"), Some(again), later);
    assert_eq!(figures(&index, "x", "a"), Some((3, 3)));
}

#[test]
fn a_class_with_wrong_parameters_has_no_objects_until_it_is_made_anew() {
    let mut index = Index::default();
    index.put_node(&node("a"), Some(room("a", &[3])), now());
    index.put_class(class("x", json!({"sploitQuantum": "1Gi"})), now());
    assert_eq!(figures(&index, "x", "a"), None);
    index.put_class(class("x", json!({})), now());
    assert_eq!(figures(&index, "x", "a"), Some((3, 3)));
    assert!(index.put_class(class("x", json!({})), now()).is_empty(), "nothing new");
}

#[test]
fn a_class_is_told_of_the_nodes_that_it_allows() {
    let mut index = Index::default();
    let mut only = class("x", json!({}));
    only.topologies = vec![vec![(TOPOLOGY_KEY.to_owned(), vec!["b".to_owned()])]];
    index.put_class(only, now());
    index.put_node(&node("a"), Some(room("a", &[3])), now());
    index.put_node(&node("b"), Some(room("b", &[3])), now());
    assert_eq!((figures(&index, "x", "a"), figures(&index, "x", "b")), (None, Some((3, 3))));
}

#[test]
fn a_selector_that_leaves_a_node_out_leaves_it_nothing() {
    let mut index = Index::default();
    index.put_class(class("x", json!({"nodeSelector": "disks=fast"})), now());
    index.put_node(&node("a"), Some(room("a", &[3])), now());
    let mut fast = room("b", &[3]);
    for view in &mut fast.pools {
        view.node_labels = Arc::new([("disks".to_owned(), "fast".to_owned())].into());
    }
    index.put_node(&node("b"), Some(fast), now());
    assert_eq!((figures(&index, "x", "a"), figures(&index, "x", "b")), (Some((0, 0)), Some((3, 3))));
}

#[test]
fn a_node_whose_name_no_label_holds_is_left_out() {
    let long = format!("a.{}", "b".repeat(62));
    let mut index = Index::default();
    index.put_class(class("x", json!({})), now());
    index.put_node(&node(&long), Some(room(&long, &[3])), now());
    assert_eq!(figures(&index, "x", &long), None);
}

#[test]
fn an_event_that_is_older_than_the_own_write_is_not_believed() {
    let mut index = Index::default();
    index.put_class(class("x", json!({})), now());
    index.put_node(&node("a"), Some(room("a", &[3])), now());
    let name = name("x", &node("a"));
    let own = |uid: &str, version, gib| {
        let figures = Some(Figures { capacity: Bytes::gib(gib), maximum: Bytes::gib(gib) });
        Found::Own(Published { uid: uid.into(), version, figures, fits: true })
    };
    assert!(index.put_found(&name, own("u", 9, 3)));
    assert!(!index.put_found(&name, own("u", 8, 5)));
    assert_eq!(index.step(&name), Step::Nothing);
    assert!(index.put_found(&name, own("v", 7, 5)), "it was made anew");
    assert_eq!(index.step(&name), Step::Write(Urgency::Less));
}

/// The same node, which carries everything.
fn able(room: NodeRoom, name: &str) -> NodeRoom {
    NodeRoom { reach: Network::able([node(name)]).node(&node(name)).cloned(), ..room }
}

#[test]
fn a_node_has_what_it_reaches_of_the_whole_cluster_also_without_pools() {
    let mut index = Index::default();
    index.put_class(class("many", json!({})), now());
    index.put_class(class("one", json!({"maxBranches": "1"})), now());
    index.put_class(class("here", json!({"placement": "local"})), now());
    for (name, pools) in [("a", &[3, 4][..]), ("b", &[5]), ("compute", &[])] {
        index.put_node(&node(name), Some(able(room(name, pools), name)), now());
    }
    index.put_node(&node("silent"), Some(room("silent", &[7])), now());
    assert!(index.is_stale());
    index.refresh_offers(now());
    assert!(!index.is_stale());
    for on in ["a", "b", "compute"] {
        assert_eq!(figures(&index, "many", on), Some((12, 12)), "{on}");
        assert_eq!(figures(&index, "one", on), Some((12, 5)), "{on}");
    }
    assert_eq!(figures(&index, "many", "silent"), Some((7, 7)));
    assert_eq!((figures(&index, "here", "a"), figures(&index, "here", "compute")), (Some((7, 7)), None));

    // What others have of it follows with the next offers.
    index.put_node(&node("b"), Some(able(room("b", &[1]), "b")), now());
    let names = index.refresh_offers(now());
    assert!(names.contains(&name("many", &node("compute"))) && !names.contains(&name("here", &node("a"))));
    assert_eq!(figures(&index, "many", "compute"), Some((8, 8)));
    assert!(index.refresh_offers(now()).is_empty(), "nothing new");

    // An owner whose agent is silent gives nothing to anybody.
    let later = now() + SignedDuration::from_mins(16);
    for (name, pools) in [("b", &[1][..]), ("compute", &[])] {
        let speaks = NodeRoom { heartbeat: Some(later), ..able(room(name, pools), name) };
        index.put_node(&node(name), Some(speaks), later);
    }
    index.refresh_node(&node("a"), later);
    index.refresh_offers(later);
    assert_eq!(figures(&index, "many", "compute"), Some((1, 1)));
    assert_eq!(figures(&index, "many", "a"), Some((0, 0)));

    index.put_node(&node("b"), None, later);
    index.refresh_offers(later);
    assert_eq!(figures(&index, "many", "compute"), Some((0, 0)));
}

#[test]
fn a_thousand_nodes_and_five_classes_are_computed_one_node_at_a_time() {
    let mut index = Index::default();
    for number in 0..5 {
        index.put_class(class(&format!("c{number}"), json!({})), now());
    }
    for number in 0..1000 {
        let name = format!("n{number}");
        assert_eq!(index.put_node(&node(&name), Some(room(&name, &[3, 4, 5])), now()).len(), 5);
    }
    assert_eq!(index.names().len(), 5000, "all names differ");
}
