//! Finds what died and puts it back under running workloads.
//!
//! One task. It waits on the pidfd of every union's process, so that a death is seen at once, and looks at every volume
//! from time to time, for what no pidfd tells: a daemon that hangs, a branch that failed, a mount that someone removed. For a
//! volume with branches on other nodes it follows their objects, so that one that was taken from this node, or opened to it
//! anew, is seen at once: with a few volumes each volume's, with many those of the nodes that own their branches.
//! What is wrong is decided and repaired by [`Volumes`]; here is only when to look, and how often.

use std::collections::{BTreeSet, HashMap, HashSet};
use std::hash::{DefaultHasher, Hash, Hasher};
use std::os::fd::{AsFd, OwnedFd};
use std::time::Duration;

use tokio::io::Interest;
use tokio::io::unix::AsyncFd;
use tokio::task::{AbortHandle, JoinSet};
use tokio::time::Instant;
use tokio_util::sync::CancellationToken;

use super::alarm::Alarm;
use super::union::watch_exit;
use super::volume::{Followed, News, Outcome, Volumes, to_follow};
use crate::domain::VolumeId;
use crate::platform::fserror::FsErrors;
use crate::platform::process::ProcessId;

/// How often branches under a running MergerFS are asked whether they are well, at most: for so long, and the time to end
/// its process, a union can stay over a branch that failed.
const GLANCE_EVERY: Duration = Duration::from_millis(250);

/// Rest after such a question, in multiples of the time that it took: a third of a percent of one core is work, 1 ms in
/// each 300 ms for 200 branches.
const GLANCE_REST: u32 = 300;

/// Longest rest, also where a branch did not answer, which is not asked again before it was looked at closely.
const GLANCE_AT_LEAST: Duration = Duration::from_secs(1);

/// How often volumes are looked at closely that seem well, at most.
const LOOK_EVERY: Duration = Duration::from_secs(5);

/// From the moment that a filesystem tells of an error to a look at it: ext4 tells first, and becomes read-only then.
const AFTER_ERROR: Duration = Duration::from_millis(20);

/// Time between two looks for each volume that there is: a look asks each branch in a thread, about 0.2 ms a volume, and
/// an idle agent shall stay far below half a percent of a core.
const LOOK_SHARE: Duration = Duration::from_millis(150);

/// How soon a volume is looked at again that someone else was busy with.
const BUSY_PAUSE: Duration = Duration::from_secs(1);

/// How often attachments are looked for that no volume needs; the first time at once, and whenever what this node can carry
/// changes: what was let go while its kernel did not answer is attached still.
const SWEEP_EVERY: Duration = Duration::from_secs(600);

/// Repairs at the same time. Each starts a process and enters other mount namespaces, which takes some tens of
/// milliseconds of one core.
const PARALLEL_REPAIRS: usize = 16;

/// Repairs unions until it is told to stop.
#[derive(Debug)]
pub struct Healer {
    volumes: Volumes,
    /// Processes that are watched, by volume.
    watched: HashMap<VolumeId, ProcessId>,
    exits: JoinSet<Exit>,
    /// When volumes are to be repaired.
    due: HashMap<VolumeId, Instant>,
    running: HashSet<VolumeId>,
    /// A question to all branches, at most one: the volumes that failed, and when to ask next.
    glances: JoinSet<(Vec<VolumeId>, Instant)>,
    /// A look at all volumes, at most one: those to be repaired, and how many there are.
    looks: JoinSet<(Vec<VolumeId>, usize)>,
    repairs: JoinSet<(VolumeId, Option<Outcome>)>,
    /// Whose branches' objects are followed.
    followed: HashMap<Followed, AbortHandle>,
    follows: JoinSet<(Followed, Option<News>, Vec<VolumeId>)>,
    /// The volumes that were there when that was decided.
    known: BTreeSet<VolumeId>,
    /// Volumes that came since what is followed was first read; true for those whose branches' news matter.
    catches: JoinSet<(VolumeId, bool)>,
    /// A look for attachments that nobody needs, at most one.
    sweeps: JoinSet<()>,
}

/// The end of watching a process.
#[derive(Debug)]
struct Exit {
    volume: VolumeId,
    process: ProcessId,
    /// False where it could not be watched.
    ended: bool,
}

impl Healer {
    /// A healer of these volumes.
    #[must_use]
    pub fn new(volumes: Volumes) -> Self {
        Self {
            volumes,
            watched: HashMap::new(),
            exits: JoinSet::new(),
            due: HashMap::new(),
            running: HashSet::new(),
            glances: JoinSet::new(),
            looks: JoinSet::new(),
            repairs: JoinSet::new(),
            followed: HashMap::new(),
            follows: JoinSet::new(),
            known: BTreeSet::new(),
            catches: JoinSet::new(),
            sweeps: JoinSet::new(),
        }
    }

    /// Watches and repairs until `shutdown`. Repairs that have begun are finished.
    pub async fn run(mut self, shutdown: CancellationToken) {
        let mut next_look = Instant::now() + LOOK_EVERY;
        let mut next_glance = Instant::now();
        let mut next_sweep = Instant::now();
        let mut carried = self.volumes.carried();
        let errors = self.volumes.fs_errors().and_then(waitable);
        let mut alarm = Alarm::start(&self.volumes);
        let mut ask_again = false;
        let (mut last_look, mut look_again) = (Instant::now(), false);
        self.watch();
        loop {
            self.start_due();
            let next = self.next_due();
            let volumes = self.volumes.clone();
            tokio::select! {
                () = shutdown.cancelled() => break,
                Some(exit) = self.exits.join_next() => match exit {
                    Ok(exit) => self.exited(exit),
                    Err(error) => tracing::error!(error = %error, "a watch ended early"),
                },
                Some(repaired) = self.repairs.join_next() => match repaired {
                    Ok((volume, outcome)) => self.finished(volume, outcome),
                    Err(error) => tracing::error!(error = %error, "a repair ended early"),
                },
                () = volumes.changed() => self.watch(),
                () = tokio::time::sleep_until(next_sweep), if self.sweeps.is_empty() => {
                    let volumes = self.volumes.clone();
                    self.sweeps.spawn(async move { volumes.sweep().await });
                    next_sweep = Instant::now() + SWEEP_EVERY;
                }
                Ok(()) = carried.changed() => next_sweep = Instant::now(),
                Some(swept) = self.sweeps.join_next() => if let Err(error) = swept {
                    tracing::error!(error = %error, "a look for attachments that nobody needs ended early");
                },
                Some(news) = self.follows.join_next() => match news {
                    Ok((followed, news, matter)) => self.told(followed, news, matter),
                    // It is no longer followed.
                    Err(error) if error.is_cancelled() => {}
                    Err(error) => {
                        tracing::error!(error = %error, "following a volume's branches ended early");
                        // Whichever it was: all are followed anew.
                        self.follows.abort_all();
                        self.followed.clear();
                    }
                },
                Some(caught) = self.catches.join_next() => match caught {
                    Ok((volume, true)) => drop(self.due.insert(volume, Instant::now())),
                    Ok((_, false)) => {}
                    Err(error) => tracing::error!(error = %error, "reading a volume's branches ended early"),
                },
                () = tokio::time::sleep_until(next), if self.running.len() < PARALLEL_REPAIRS => {}
                // Both in tasks of their own: a disk that does not answer must not hold up the repair of what died.
                () = tokio::time::sleep_until(next_glance), if self.glances.is_empty() => {
                    self.glances.spawn(glance(volumes));
                }
                Some(glanced) = self.glances.join_next() => match glanced {
                    Ok((failing, next)) => {
                        // At once, whatever pause they are in: another branch may be waited for.
                        self.due.extend(failing.into_iter().map(|volume| (volume, Instant::now())));
                        next_glance = if std::mem::take(&mut ask_again) { Instant::now() } else { next };
                    }
                    Err(error) => {
                        tracing::error!(error = %error, "a question to the branches ended early");
                        next_glance = Instant::now() + LOOK_EVERY;
                    }
                },
                // Which one failed is found by a look.
                () = told(errors.as_ref()), if self.looks.is_empty() => {
                    next_look = next_look.min((Instant::now() + AFTER_ERROR).max(last_look + GLANCE_EVERY));
                    look_again = true;
                }
                cut_off = Alarm::heard(alarm.as_mut()) => {
                    self.due.extend(cut_off.into_iter().map(|volume| (volume, Instant::now())));
                    // One that is under way may have asked before.
                    ask_again = !self.glances.is_empty();
                    next_glance = Instant::now();
                }
                () = tokio::time::sleep_until(next_look), if self.looks.is_empty() => {
                    let volumes = self.volumes.clone();
                    self.looks.spawn(async move { volumes.suspicious().await });
                }
                Some(looked) = self.looks.join_next() => {
                    let count = match looked {
                        Ok((suspicious, count)) => {
                            self.mark(suspicious);
                            self.watch();
                            u32::try_from(count).unwrap_or(u32::MAX)
                        }
                        Err(error) => {
                            tracing::error!(error = %error, "a look at the volumes ended early");
                            0
                        }
                    };
                    last_look = Instant::now();
                    let pause = if look_again { GLANCE_EVERY } else { LOOK_EVERY.max(LOOK_SHARE * count) };
                    look_again = false;
                    next_look = last_look + pause;
                }
            }
        }
        while let Some(repaired) = self.repairs.join_next().await {
            if let Err(error) = repaired {
                tracing::error!(error = %error, "a repair ended early");
            }
        }
    }

    /// Watches the processes that are there now and no others.
    fn watch(&mut self) {
        self.follow();
        let wanted: HashMap<_, _> = self.volumes.processes().into_iter().collect();
        self.watched.retain(|volume, process| wanted.get(volume) == Some(process));
        for (volume, process) in wanted {
            if self.watched.contains_key(&volume) {
                continue;
            }
            self.watched.insert(volume.clone(), process.clone());
            let host = self.volumes.host().clone();
            self.exits.spawn(async move {
                let watched = watch_exit(&host, &process).await;
                if let Err(error) = &watched {
                    // The looks find its death as well, only later.
                    tracing::warn!(volume.id = %volume, error = %error, "its mergerfs cannot be watched");
                }
                Exit { volume, process, ended: watched.is_ok() }
            });
        }
    }

    /// Follows the objects of the branches on other nodes that volumes have now, and of no others.
    fn follow(&mut self) {
        let remote = self.volumes.remote();
        let wanted = to_follow(&remote);
        self.followed.retain(|followed, task| {
            let stays = wanted.contains(followed);
            if !stays {
                task.abort();
            }
            stays
        });
        for followed in &wanted {
            if !self.followed.contains_key(followed) {
                self.follow_one(followed.clone(), None);
            }
        }
        let now: BTreeSet<VolumeId> = remote.into_keys().collect();
        for volume in now.difference(&self.known) {
            // What its owners' news told before it was there was not kept.
            if !wanted.contains(&Followed::Volume(volume.clone())) {
                let (volumes, volume) = (self.volumes.clone(), volume.clone());
                self.catches.spawn(async move {
                    let matters = volumes.catch_up(&volume).await;
                    (volume, matters)
                });
            }
        }
        self.known = now;
    }

    fn follow_one(&mut self, followed: Followed, news: Option<News>) {
        let (volumes, of) = (self.volumes.clone(), followed.clone());
        let task = self.follows.spawn(async move {
            let (news, matter) = volumes.follow(&of, news).await;
            (of, news, matter)
        });
        self.followed.insert(followed, task);
    }

    fn told(&mut self, followed: Followed, news: Option<News>, matter: Vec<VolumeId>) {
        if !self.followed.contains_key(&followed) {
            return;
        }
        for volume in matter {
            // At once, whatever pause it is in: it may be what was waited for.
            self.due.insert(volume, Instant::now());
        }
        self.follow_one(followed, news);
    }

    fn exited(&mut self, exit: Exit) {
        let Exit { volume, process, ended } = exit;
        // One that was replaced or unstaged meanwhile is nobody's loss.
        if ended && self.watched.get(&volume) == Some(&process) {
            self.watched.remove(&volume);
            tracing::warn!(volume.id = %volume, process.id = process.pid, "mergerfs ended");
            self.due.insert(volume, Instant::now());
        }
    }

    /// Marks volumes that need a repair.
    fn mark(&mut self, volumes: Vec<VolumeId>) {
        let now = Instant::now();
        for volume in volumes {
            self.due.entry(volume).or_insert(now);
        }
    }

    fn start_due(&mut self) {
        let now = Instant::now();
        let ready: Vec<_> = self
            .due
            .iter()
            .filter(|(volume, at)| **at <= now && !self.running.contains(*volume))
            .map(|(volume, _)| volume.clone())
            .take(PARALLEL_REPAIRS.saturating_sub(self.running.len()))
            .collect();
        for volume in ready {
            self.due.remove(&volume);
            self.running.insert(volume.clone());
            let volumes = self.volumes.clone();
            self.repairs.spawn(async move {
                let outcome = volumes.heal(&volume).await;
                (volume, outcome)
            });
        }
    }

    fn finished(&mut self, volume: VolumeId, outcome: Option<Outcome>) {
        self.running.remove(&volume);
        let pause = match outcome {
            Some(Outcome::Fine | Outcome::Repaired | Outcome::Gone) => return,
            Some(Outcome::Troubled { pause, .. }) => pause,
            None => BUSY_PAUSE + jitter(&volume, BUSY_PAUSE),
        };
        self.due.entry(volume).or_insert_with(|| Instant::now() + pause);
    }

    fn next_due(&self) -> Instant {
        let waiting = self.due.iter().filter(|(volume, _)| !self.running.contains(*volume));
        waiting.map(|(_, at)| *at).min().unwrap_or_else(|| Instant::now() + LOOK_EVERY)
    }
}

#[expect(
    deprecated,
    reason = "its successor is unsafe for types that may change their descriptor; this one does not"
)]
fn waitable(of: OwnedFd) -> Option<AsyncFd<OwnedFd>> {
    AsyncFd::with_interest(of, Interest::READABLE).ok()
}

/// Returns when a filesystem has told of an error.
async fn told(errors: Option<&AsyncFd<OwnedFd>>) {
    let Some(errors) = errors else { return std::future::pending().await };
    match errors.readable().await {
        Ok(mut ready) => {
            if let Err(error) = FsErrors::take(errors.get_ref().as_fd()) {
                tracing::warn!(error = %error, "what filesystems tell of errors cannot be read");
            }
            ready.clear_ready();
        }
        // The reactor is shutting down.
        Err(_) => std::future::pending().await,
    }
}

/// Asks all branches once.
async fn glance(volumes: Volumes) -> (Vec<VolumeId>, Instant) {
    let begun = Instant::now();
    let failing = volumes.failing().await;
    let now = Instant::now();
    (failing, now + ((now - begun) * GLANCE_REST).clamp(GLANCE_EVERY, GLANCE_AT_LEAST))
}

/// A share of `of` that differs between volumes, so that they do not all come back at once.
fn jitter(volume: &VolumeId, of: Duration) -> Duration {
    let mut hasher = DefaultHasher::new();
    volume.hash(&mut hasher);
    of * u32::try_from(hasher.finish() % 256).unwrap_or(0) / 256
}
