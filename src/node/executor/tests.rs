use super::*;
use crate::domain::Bytes;
use crate::domain::split::BranchFormat;
use crate::store::object::{BranchPhase, BranchSpec, BranchStatus, Meta};

fn branch(index: u32, phase: BranchPhase) -> Branch {
    let volume: crate::domain::VolumeId = "v".parse().unwrap();
    let id = volume.branch(index);
    Branch {
        meta: Meta::with_finalizer(id.as_str()),
        spec: BranchSpec {
            id,
            volume,
            index,
            node: "n".parse().unwrap(),
            pool: "p".parse().unwrap(),
            size: Bytes::gib(1),
            usable: Bytes::gib(1),
            format: BranchFormat::Directory,
            fs_type: None,
            thin: false,
            accept_unenforced: true,
            write_through: true,
            encrypted: false,
            access: None,
            sharing: None,
        },
        status: BranchStatus { phase, ..BranchStatus::default() },
    }
}

fn due(state: &mut State) -> Vec<String> {
    std::iter::from_fn(|| state.queue.next(Instant::now())).collect()
}

fn report(state: PoolState) -> PoolReport {
    let mut report: PoolReport = serde_json::from_str(r#"{"name":"p","total":0,"free":0}"#).unwrap();
    report.state = state;
    report
}

fn done(branch: &Branch) -> Done {
    Done { name: branch.meta.name.clone(), retry: None, settled: Some(branch.clone()), changed: true }
}

#[tokio::test(start_paused = true)]
async fn the_writing_of_a_status_is_no_reason_to_look_again() {
    let mut state = State::default();
    state.note(Event::Applied(branch(0, BranchPhase::Pending)));
    assert_eq!(due(&mut state), ["v-0"]);
    // The event of the write may come before the end of the work, or after it.
    state.note(Event::Applied(branch(0, BranchPhase::Bound)));
    state.finish(done(&branch(0, BranchPhase::Bound)));
    assert_eq!(due(&mut state), Vec::<String>::new());
    state.note(Event::Applied(branch(0, BranchPhase::Bound)));
    assert_eq!(due(&mut state), Vec::<String>::new());
    let deleting = Meta { deleting: Some(jiff::Timestamp::UNIX_EPOCH), ..Meta::with_finalizer("v-0") };
    state.note(Event::Applied(Branch { meta: deleting, ..branch(0, BranchPhase::Bound) }));
    assert_eq!(due(&mut state), ["v-0"], "a removal is");
}

#[tokio::test(start_paused = true)]
async fn a_removal_that_is_asked_for_while_a_branch_is_made_is_not_lost() {
    let mut state = State::default();
    state.note(Event::Applied(branch(0, BranchPhase::Pending)));
    due(&mut state);
    let deleting = Meta { deleting: Some(jiff::Timestamp::UNIX_EPOCH), ..Meta::with_finalizer("v-0") };
    state.note(Event::Applied(Branch { meta: deleting, ..branch(0, BranchPhase::Bound) }));
    state.finish(done(&branch(0, BranchPhase::Bound)));
    assert_eq!(due(&mut state), ["v-0"]);
}

#[tokio::test(start_paused = true)]
async fn the_branches_of_a_pool_that_comes_or_goes_are_looked_at() {
    let mut state = State::default();
    state.pools_measured(&[report(PoolState::Ready)]);
    state.note(Event::Applied(branch(0, BranchPhase::Bound)));
    due(&mut state);
    state.finish(done(&branch(0, BranchPhase::Bound)));
    state.pools_measured(&[report(PoolState::Ready)]);
    assert_eq!(due(&mut state), Vec::<String>::new(), "nothing changed");
    state.pools_measured(&[report(PoolState::Absent)]);
    assert_eq!(due(&mut state), ["v-0"]);
}

#[tokio::test(start_paused = true)]
async fn a_pool_that_goes_between_a_branchs_last_look_and_the_end_of_the_work_on_it_is_not_overlooked() {
    let mut state = State::default();
    state.pools_measured(&[report(PoolState::Ready)]);
    state.note(Event::Applied(branch(0, BranchPhase::Pending)));
    due(&mut state);
    state.note(Event::Applied(branch(0, BranchPhase::Bound)));
    state.pools_measured(&[report(PoolState::Absent)]);
    state.finish(done(&branch(0, BranchPhase::Bound)));
    assert_eq!(due(&mut state), ["v-0"]);
}

#[tokio::test(start_paused = true)]
async fn what_went_while_the_watch_was_broken_is_forgotten() {
    let mut state = State::default();
    state.note(Event::Applied(branch(0, BranchPhase::Pending)));
    state.note(Event::Applied(branch(1, BranchPhase::Pending)));
    state.seen.clear();
    state.note(Event::Applied(branch(1, BranchPhase::Pending)));
    state.note(Event::Ready);
    assert_eq!(due(&mut state), ["v-1"]);
    assert_eq!(state.wanted.len(), 1);
}

#[tokio::test]
async fn nothing_is_taken_for_nobodys_before_all_objects_were_heard_of() {
    let directory = tempfile::tempdir().unwrap();
    let store = crate::store::local::LocalStore::open(&directory.path().join("s")).unwrap();
    let (host, node): (_, NodeName) = (crate::platform::Host::new(), "n".parse().unwrap());
    let pools = Arc::new(Pools::new(host.clone(), node.clone(), Vec::new(), directory.path().to_owned()));
    let facts = NodeFacts {
        labels: Default::default(),
        cluster_labels: watch::Sender::new(None).subscribe(),
        agent_version: String::new(),
        mergerfs_version: None,
        kernel: String::new(),
        measure_interval: Duration::from_secs(5),
        ephemeral_dir: directory.path().to_owned(),
    };
    let branches = Arc::new(Branches::new(host.clone(), pools.clone()));
    let exporting = Exporting {
        transports: Arc::new(crate::node::transport::Transports::none()),
        uses: Arc::new(Unused),
        keys: crate::node::keys::KeyFiles::new(&host, directory.path()),
    };
    let executor = Executor::new(Arc::new(store), node, facts, pools, branches, exporting);
    let mut state = State::default();
    let mut inline = branch(0, BranchPhase::Bound);
    inline.meta.labels.insert(crate::store::object::LABEL_EPHEMERAL.to_owned(), "true".to_owned());
    state.note(Event::Applied(inline));
    executor.look_for_strays(&mut state).await;
    assert_eq!(*executor.strays.borrow(), None);
    state.note(Event::Ready);
    executor.look_for_strays(&mut state).await;
    let found = executor.strays.borrow().clone().unwrap();
    assert_eq!(found.abandoned, ["v".parse().unwrap()]);
}

/// Nothing here is used.
struct Unused;

impl LocalUse for Unused {
    fn end(&self, _branch: &crate::store::object::BranchSpec) -> Result<(), String> {
        Ok(())
    }
}
