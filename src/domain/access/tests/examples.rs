use std::collections::BTreeMap;

use super::super::*;

fn node(name: &str) -> NodeName {
    name.parse().unwrap()
}

fn access(consumer: Option<&str>, epoch: u64) -> Access {
    Access { consumer: consumer.map(node), epoch: Epoch(epoch) }
}

fn report(consumer: Option<&str>, epoch: u64, generation: u64) -> ExportReport {
    ExportReport {
        generation: Generation(generation),
        allowed: access(consumer, epoch),
        ..ExportReport::default()
    }
}

fn lead(wanted: &[(&str, bool)], spec: Option<Access>, told: Option<ExportReport>) -> LeaderDecision {
    lead_with(wanted, spec, told, None)
}

fn lead_with(
    wanted: &[(&str, bool)],
    spec: Option<Access>,
    told: Option<ExportReport>,
    owner_down: Option<&str>,
) -> LeaderDecision {
    let claimants: Vec<Claimant> = wanted
        .iter()
        .map(|(name, out_of_service)| Claimant {
            node: node(name),
            out_of_service: *out_of_service,
            reads: false,
        })
        .collect();
    leader_step(&Led {
        claimants: &claimants,
        owner: &node("o"),
        owner_down,
        access: spec.as_ref(),
        report: told.as_ref(),
    })
}

#[test]
fn a_move_is_a_revocation_then_the_owners_report_then_a_grant() {
    let (a, b) = ([("a", false)], [("b", false)]);
    assert_eq!(lead(&a, None, None), LeaderDecision::Revoke(access(None, 1)));
    assert!(matches!(lead(&a, Some(access(None, 1)), None), LeaderDecision::Wait(Waiting::Fenced { .. })));
    let fenced = Some(report(None, 1, 0));
    assert_eq!(lead(&a, Some(access(None, 1)), fenced), LeaderDecision::Grant(access(Some("a"), 2)));
    let has = Some(report(Some("a"), 2, 1));
    assert_eq!(lead(&a, Some(access(Some("a"), 2)), has.clone()), LeaderDecision::Settled);
    assert_eq!(lead(&b, Some(access(Some("a"), 2)), has.clone()), LeaderDecision::Revoke(access(None, 3)));
    let LeaderDecision::Wait(waiting) = lead(&b, Some(access(None, 3)), has) else { panic!("must wait") };
    assert_eq!(
        waiting.to_string(),
        "node a may still write to the branch: node o, which holds it, has not reported that it took all access back"
    );
    let fenced = Some(report(None, 3, 1));
    assert_eq!(lead(&b, Some(access(None, 3)), fenced), LeaderDecision::Grant(access(Some("b"), 4)));
}

#[test]
fn a_branch_that_only_its_own_node_ever_wanted_costs_no_order() {
    assert_eq!(lead(&[("o", false)], None, None), LeaderDecision::Settled);
    assert_eq!(lead(&[("o", false), ("a", false)], None, None), LeaderDecision::Settled);
    assert_eq!(lead(&[], None, None), LeaderDecision::Settled);
}

#[test]
fn a_branch_that_was_once_wanted_elsewhere_comes_home_by_orders() {
    let home = [("o", false)];
    let fenced = Some(report(None, 3, 1));
    assert_eq!(
        lead(&home, Some(access(None, 3)), fenced.clone()),
        LeaderDecision::Grant(access(Some("o"), 4))
    );
    assert_eq!(lead(&home, None, fenced), LeaderDecision::Revoke(access(None, 4)), "the spec was lost");
    assert!(matches!(lead(&home, Some(access(None, 1)), None), LeaderDecision::Wait(Waiting::Fenced { .. })));
}

#[test]
fn a_node_out_of_service_has_no_claim_and_its_access_is_taken_back() {
    let has = Some(report(Some("a"), 2, 1));
    let spec = Some(access(Some("a"), 2));
    assert_eq!(lead(&[("a", true)], spec.clone(), has.clone()), LeaderDecision::Revoke(access(None, 3)));
    assert_eq!(lead(&[("a", true), ("b", false)], spec, has), LeaderDecision::Revoke(access(None, 3)));
    let fenced = Some(report(None, 3, 1));
    let moved = lead(&[("a", true), ("b", false)], Some(access(None, 3)), fenced);
    assert_eq!(moved, LeaderDecision::Grant(access(Some("b"), 4)));
}

#[test]
fn an_owner_that_does_not_answer_is_waited_for_and_the_reason_says_so() {
    let told = Some(report(Some("a"), 2, 1));
    let LeaderDecision::Wait(waiting) =
        lead_with(&[("b", false)], Some(access(None, 3)), told, Some("its agent is silent for 90 s"))
    else {
        panic!("must wait")
    };
    assert!(
        waiting.to_string().ends_with(
            "it does not answer (its agent is silent for 90 s), and only it can: the branch is given to nobody else \
             until it returns"
        ),
        "{waiting}"
    );
}

#[test]
fn an_order_that_the_spec_does_not_hold_is_taken_back_by_a_newer_one() {
    let b = [("b", false)];
    let newer = Some(report(Some("a"), 7, 3));
    assert_eq!(lead(&b, Some(access(None, 4)), newer.clone()), LeaderDecision::Revoke(access(None, 8)));
    assert_eq!(lead(&b, Some(access(Some("b"), 7)), newer), LeaderDecision::Revoke(access(None, 8)));
}

#[test]
fn an_epoch_written_by_hand_that_has_no_next_is_told() {
    // The last that an API server takes, and the last of the type.
    for last in [u64::MAX >> 1, u64::MAX] {
        let spec = Some(access(None, last));
        assert_eq!(lead(&[("a", false)], spec, None), LeaderDecision::Wait(Waiting::Exhausted));
    }
}

/// An owner `o` whose kernel and mark are as given, in boot `2`.
struct Owner {
    wanted: Option<Access>,
    deleting: bool,
    mark: Option<Mark>,
    durable: bool,
    export: Option<Exported>,
    here: bool,
    known: Vec<(&'static str, &'static str)>,
    reported: Option<ExportReport>,
}

impl Owner {
    fn new(wanted: Option<Access>, mark: Option<Mark>) -> Self {
        let known = vec![("a", "nqn-a"), ("b", "nqn-b")];
        Self {
            wanted,
            deleting: false,
            mark,
            durable: false,
            export: None,
            here: false,
            known,
            reported: None,
        }
    }

    fn step(&self) -> Vec<OwnerAction> {
        let identities: BTreeMap<NodeName, String> =
            self.known.iter().map(|(name, identity)| (node(name), (*identity).to_owned())).collect();
        owner_step(&Owned {
            node: &node("o"),
            wanted: self.wanted.as_ref(),
            deleting: self.deleting,
            mark: self.mark.as_ref(),
            boot_id: "2",
            durable: self.durable,
            export: self.export.as_ref(),
            here: self.here,
            identities: &identities,
            reported: self.reported.as_ref(),
        })
    }
}

fn mark(access: Access, generation: u64, boot_id: &str, clean: bool) -> Mark {
    let peer = access.consumer.as_ref().map(|consumer| format!("nqn-{consumer}"));
    let generation = Generation(generation);
    Mark { generation, access, peer, boot_id: boot_id.to_owned(), clean, durable: false }
}

fn export(generation: u64, allowed: &[&str]) -> Exported {
    Exported {
        generation: Generation(generation),
        address: "10.0.0.1:4420".to_owned(),
        name: format!("nqn:{generation}"),
        transport: Transport::NvmeTcp,
        allowed: allowed.iter().map(|peer| (*peer).to_owned()).collect(),
        readers: Vec::new(),
    }
}

#[test]
fn a_new_order_fences_everybody_before_it_is_noted_and_gets_a_generation_of_its_own() {
    let mut owner = Owner::new(Some(access(Some("b"), 4)), Some(mark(access(Some("a"), 2), 6, "2", false)));
    owner.export = Some(export(6, &["nqn-a"]));
    assert_eq!(
        owner.step(),
        [
            OwnerAction::Fence(Peer::Remote("nqn-a".to_owned())),
            OwnerAction::Unexport,
            OwnerAction::Remember(mark(access(Some("b"), 4), 7, "2", false)),
            OwnerAction::Export(Generation(7)),
            OwnerAction::Allow("nqn-b".to_owned()),
        ]
    );
}

#[test]
fn what_is_done_is_reported_once() {
    let has = access(Some("a"), 2);
    let mut owner = Owner::new(Some(has.clone()), Some(mark(has.clone(), 6, "2", false)));
    owner.export = Some(export(6, &["nqn-a"]));
    let [OwnerAction::Report(report)] = &owner.step()[..] else { panic!("one report") };
    assert_eq!(
        (report.generation, &report.allowed, report.transport),
        (Generation(6), &has, Some(Transport::NvmeTcp))
    );
    assert_eq!((report.address.as_deref(), report.name.as_deref()), (Some("10.0.0.1:4420"), Some("nqn:6")));
    owner.reported = Some(report.clone());
    assert_eq!(owner.step(), []);
}

#[test]
fn an_unclean_boot_raises_the_generation_and_a_clean_stop_keeps_it() {
    let has = access(Some("a"), 2);
    let first = |clean| Owner::new(Some(has.clone()), Some(mark(has.clone(), 6, "1", clean))).step();
    let remembered = |generation| OwnerAction::Remember(mark(has.clone(), generation, "2", false));
    let allow = OwnerAction::Allow("nqn-a".to_owned());
    assert_eq!(first(false), [remembered(7), OwnerAction::Export(Generation(7)), allow.clone()]);
    assert_eq!(first(true), [remembered(6), OwnerAction::Export(Generation(6)), allow]);
}

#[test]
fn a_crash_that_can_have_lost_nothing_keeps_the_generation_and_the_waiting_peer_goes_on() {
    let has = access(Some("a"), 2);
    let durable = |mark| Mark { durable: true, ..mark };
    let mut owner = Owner::new(Some(has.clone()), Some(durable(mark(has.clone(), 6, "1", false))));
    owner.durable = true;
    owner.reported = Some(report(Some("a"), 2, 6));
    let now = durable(mark(has.clone(), 6, "2", false));
    assert_eq!(
        owner.step(),
        [
            OwnerAction::Remember(now.clone()),
            OwnerAction::Export(Generation(6)),
            OwnerAction::Allow("nqn-a".to_owned())
        ]
    );
    owner.mark = Some(now);
    owner.export = Some(export(6, &["nqn-a"]));
    let [OwnerAction::Report(told)] = &owner.step()[..] else { panic!("one report") };
    let held = [Held { generation: Generation(6), epoch: Some(Epoch(2)) }];
    assert_eq!(consume(&held, true, &has, told), ConsumerDecision::Settled);
}

#[test]
fn what_is_durable_now_says_nothing_about_the_boot_that_crashed() {
    let has = access(Some("a"), 2);
    let first = |was: bool, is: bool| {
        let mark = Mark { durable: was, ..mark(has.clone(), 6, "1", false) };
        let owner = Owner { durable: is, ..Owner::new(Some(has.clone()), Some(mark)) };
        let [OwnerAction::Remember(mark), ..] = &owner.step()[..] else { panic!("a mark first") };
        assert_eq!(mark.durable, is);
        mark.generation
    };
    assert_eq!(first(false, true), Generation(7), "made durable after the crash");
    assert_eq!(first(true, false), Generation(7), "replaced by one that is not");
    assert_eq!(first(true, true), Generation(6));
    let mut lost = Owner::new(Some(has.clone()), None);
    lost.durable = true;
    lost.reported = Some(report(Some("a"), 2, 6));
    assert!(
        lost.step().contains(&OwnerAction::Export(Generation(7))),
        "the mark was lost: {:?}",
        lost.step()
    );
}

#[test]
fn a_branch_that_becomes_durable_in_use_is_noted_so_and_nobody_is_disturbed() {
    let has = access(Some("a"), 2);
    let mut owner = Owner::new(Some(has.clone()), Some(mark(has.clone(), 6, "2", false)));
    owner.export = Some(export(6, &["nqn-a"]));
    owner.durable = true;
    let noted = Mark { durable: true, ..mark(has, 6, "2", false) };
    assert_eq!(owner.step(), [OwnerAction::Remember(noted)]);
}

#[test]
fn an_order_older_than_the_noted_one_is_not_obeyed() {
    let mut owner = Owner::new(Some(access(Some("a"), 2)), Some(mark(access(None, 3), 6, "2", false)));
    owner.reported = Some(ExportReport { boot_id: "2".to_owned(), ..report(None, 3, 6) });
    assert_eq!(owner.step(), []);
}

#[test]
fn two_orders_of_one_epoch_are_both_refused_and_the_leader_is_told_of_a_later_one() {
    let restored = Some(access(Some("a"), 3));
    let mut owner = Owner::new(restored.clone(), Some(mark(access(None, 3), 6, "2", false)));
    assert_eq!(owner.step(), [OwnerAction::Remember(mark(access(None, 4), 6, "2", false))]);
    owner.mark = Some(mark(access(None, 4), 6, "2", false));
    let told = ExportReport { boot_id: "2".to_owned(), ..report(None, 4, 6) };
    assert_eq!(owner.step(), [OwnerAction::Report(told.clone())]);
    assert_eq!(lead(&[("a", false)], restored, Some(told)), LeaderDecision::Revoke(access(None, 5)));
}

#[test]
fn a_lost_mark_counts_as_a_crash_and_what_was_reported_as_done() {
    let has = access(Some("a"), 2);
    let mut owner = Owner::new(Some(has.clone()), None);
    owner.reported = Some(report(Some("a"), 2, 6));
    assert_eq!(owner.step()[0], OwnerAction::Remember(mark(has, 7, "2", false)));
}

#[test]
fn a_peer_that_nobody_ordered_is_fenced_and_the_name_changes() {
    let has = access(Some("a"), 2);
    let mut owner = Owner::new(Some(has.clone()), Some(mark(has, 6, "2", false)));
    owner.export = Some(export(6, &["nqn-a", "stranger"]));
    let actions = owner.step();
    assert!(actions.contains(&OwnerAction::Fence(Peer::Remote("stranger".to_owned()))), "{actions:?}");
    assert!(actions.contains(&OwnerAction::Export(Generation(7))), "{actions:?}");
}

#[test]
fn a_node_that_changed_its_name_on_the_network_is_fenced_by_the_old_one() {
    let has = access(Some("a"), 2);
    let mut owner = Owner::new(Some(has.clone()), Some(mark(has, 6, "2", false)));
    owner.export = Some(export(6, &["nqn-a"]));
    owner.known = vec![("a", "nqn-new")];
    let actions = owner.step();
    assert_eq!(actions[0], OwnerAction::Fence(Peer::Remote("nqn-a".to_owned())));
    assert_eq!(actions[4], OwnerAction::Allow("nqn-new".to_owned()));
}

#[test]
fn a_peer_whose_identity_is_not_read_yet_keeps_what_it_has() {
    let has = access(Some("a"), 2);
    let mut owner = Owner::new(Some(has.clone()), Some(mark(has.clone(), 6, "2", false)));
    owner.export = Some(export(6, &["nqn-a"]));
    owner.known = Vec::new();
    let [OwnerAction::Report(report)] = &owner.step()[..] else { panic!("one report") };
    assert_eq!(report.allowed, has);
}

#[test]
fn a_consumer_whose_identity_is_unknown_is_not_let_in_and_not_reported_as_allowed() {
    let mut owner = Owner::new(Some(access(Some("c"), 4)), Some(mark(access(None, 3), 6, "2", false)));
    let actions = owner.step();
    assert!(!actions.iter().any(|action| matches!(action, OwnerAction::Allow(_))), "{actions:?}");
    owner.mark = Some(Mark { peer: None, ..mark(access(Some("c"), 4), 7, "2", false) });
    owner.export = Some(export(7, &[]));
    let [OwnerAction::Report(report)] = &owner.step()[..] else { panic!("one report") };
    assert_eq!(report.allowed, access(None, 4));
}

#[test]
fn a_branch_that_is_to_go_is_fenced_whatever_its_spec_says() {
    let has = access(Some("a"), 2);
    let mut owner = Owner::new(Some(has.clone()), Some(mark(has, 6, "2", false)));
    owner.export = Some(export(6, &["nqn-a"]));
    owner.deleting = true;
    assert_eq!(owner.step(), [OwnerAction::Fence(Peer::Remote("nqn-a".to_owned())), OwnerAction::Unexport]);
}

#[test]
fn a_branch_that_was_never_given_to_anybody_is_left_alone_in_use_on_its_own_node() {
    let mut owner = Owner::new(None, None);
    owner.here = true;
    assert_eq!(owner.step(), []);
    owner.wanted = Some(access(Some("o"), 1));
    assert!(!owner.step().iter().any(|action| matches!(action, OwnerAction::Fence(_))), "{:?}", owner.step());
    owner.wanted = Some(access(None, 1));
    assert_eq!(owner.step()[0], OwnerAction::Fence(Peer::Here));
}

#[test]
fn an_export_that_belongs_to_no_order_is_ended() {
    let mut owner = Owner::new(None, None);
    owner.export = Some(export(1, &["nqn-a"]));
    assert_eq!(owner.step(), [OwnerAction::Fence(Peer::Remote("nqn-a".to_owned())), OwnerAction::Unexport]);
}

fn consume(held: &[Held], needed: bool, spec: &Access, told: &ExportReport) -> ConsumerDecision {
    consumer_step(&Consuming {
        node: &node("a"),
        owner: &node("o"),
        needed,
        access: Some(spec),
        report: Some(told),
        held,
        here: false,
        mark: None,
    })
}

#[test]
fn a_consumer_attaches_only_what_spec_and_report_both_give_it() {
    let mine = access(Some("a"), 4);
    let attach = ConsumerDecision::Attach { generation: Generation(7), epoch: Epoch(4) };
    assert_eq!(consume(&[], true, &mine, &report(Some("a"), 4, 7)), attach);
    assert_eq!(consume(&[], false, &mine, &report(Some("a"), 4, 7)), ConsumerDecision::Settled);
    for (spec, told) in [
        (access(Some("b"), 5), report(Some("a"), 4, 7)),
        (access(Some("a"), 6), report(Some("a"), 4, 7)),
        (access(Some("a"), 4), report(None, 3, 6)),
        (access(None, 5), report(Some("a"), 4, 7)),
    ] {
        assert!(matches!(consume(&[], true, &spec, &told), ConsumerDecision::Wait(_)), "{spec:?} {told:?}");
    }
}

#[test]
fn what_is_of_another_time_is_ended_by_force_and_what_is_newer_than_what_was_read_is_kept() {
    let held = [Held { generation: Generation(7), epoch: Some(Epoch(4)) }];
    let mine = access(Some("a"), 4);
    let force = ConsumerDecision::ForceDetach(Generation(7));
    assert_eq!(consume(&held, true, &mine, &report(Some("a"), 4, 7)), ConsumerDecision::Settled);
    assert_eq!(consume(&held, true, &mine, &report(Some("a"), 4, 8)), force, "the owner crashed");
    assert_eq!(consume(&held, true, &access(None, 5), &report(Some("a"), 4, 7)), force, "it was revoked");
    assert_eq!(consume(&held, true, &access(Some("a"), 6), &report(None, 5, 7)), force, "it is granted anew");
    let old = access(None, 3);
    assert_eq!(consume(&held, true, &old, &report(None, 3, 6)), ConsumerDecision::Settled, "an old object");
    assert_eq!(
        consume(&held, false, &mine, &report(Some("a"), 4, 7)),
        ConsumerDecision::Detach(Generation(7))
    );
}

#[test]
fn objects_of_before_parse_and_nothing_is_written_that_is_not_there() {
    assert_eq!(serde_json::to_string(&access(None, 3)).unwrap(), r#"{"epoch":3}"#);
    assert_eq!(serde_json::from_str::<Access>(r#"{"epoch":3}"#).unwrap(), access(None, 3));
    let report: ExportReport = serde_json::from_str("{}").unwrap();
    assert_eq!(report, ExportReport::default());
}
