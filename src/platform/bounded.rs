//! Asking what may never answer.
//!
//! A system call on a dead disk or a hung FUSE daemon can sleep for ever, and nothing can wake it. Such calls run in a
//! thread of their own that is abandoned when it does not come back in time. So that a path that hangs cannot gather
//! threads, there is at most one question outstanding for each path: others wait for it as long as it is within its
//! bound, and are told at once that the path hangs when it is not. A path where something else was mounted since then is
//! asked anew.

use std::collections::HashMap;
use std::path::{Path, PathBuf};
use std::sync::{Arc, Condvar, Mutex, MutexGuard, PoisonError, mpsc};
use std::time::{Duration, Instant};

use super::{Result, failed, mount};

/// Enough for some system calls and a log line. Only what is touched becomes memory.
const STACK_BYTES: usize = 512 * 1024;

/// The questions outstanding, by path.
#[derive(Clone, Debug, Default)]
pub(super) struct Probes(Arc<Outstanding>);

#[derive(Debug, Default)]
struct Outstanding {
    slots: Mutex<Slots>,
    freed: Condvar,
}

#[derive(Debug, Default)]
struct Slots {
    by_path: HashMap<PathBuf, Slot>,
    tickets: u64,
}

#[derive(Debug)]
struct Slot {
    ticket: u64,
    state: State,
}

#[derive(Clone, Copy, Debug, PartialEq, Eq)]
enum State {
    /// Asked, and within its bound.
    Asking,
    /// Given up, with the mount that the path was on then, as far as known.
    Abandoned { mount: Option<u64> },
}

/// Frees the path when its thread ends, also by panic.
struct Release {
    probes: Probes,
    path: PathBuf,
    ticket: u64,
}

impl Drop for Release {
    fn drop(&mut self) {
        let mut slots = self.probes.lock();
        if slots.by_path.get(&self.path).is_some_and(|s| s.ticket == self.ticket) {
            slots.by_path.remove(&self.path);
        }
        drop(slots);
        self.probes.0.freed.notify_all();
    }
}

impl Probes {
    /// Runs `question`, which concerns `path`, and waits at most `bound`; `None` when there is no answer.
    ///
    /// # Errors
    /// No thread could be started.
    pub(super) fn ask<T: Send + 'static>(
        &self,
        path: &Path,
        bound: Duration,
        question: impl FnOnce() -> T + Send + 'static,
    ) -> Result<Option<T>> {
        let deadline = Instant::now() + bound;
        let Some(ticket) = self.claim(path, deadline) else { return Ok(None) };
        let release = Release { probes: self.clone(), path: path.to_owned(), ticket };
        let (answer, answered) = mpsc::sync_channel(1);
        std::thread::Builder::new()
            .name("bounded".to_owned())
            .stack_size(STACK_BYTES)
            .spawn(move || {
                let value = question();
                // Freed first: whoever has the answer may ask again at once. Nobody may be waiting any more.
                drop(release);
                let _ = answer.send(value);
            })
            .map_err(failed("clone", path))?;
        match answered.recv_timeout(deadline.saturating_duration_since(Instant::now())) {
            Ok(value) => Ok(Some(value)),
            Err(_) => {
                self.abandon(path, ticket);
                Ok(None)
            }
        }
    }

    fn lock(&self) -> MutexGuard<'_, Slots> {
        self.0.slots.lock().unwrap_or_else(PoisonError::into_inner)
    }

    fn claim(&self, path: &Path, deadline: Instant) -> Option<u64> {
        let mut slots = self.lock();
        loop {
            match slots.by_path.get(path).map(|s| (s.ticket, s.state)) {
                None => {}
                Some((_, State::Asking)) => {
                    let left = deadline.saturating_duration_since(Instant::now());
                    if left.is_zero() {
                        return None;
                    }
                    slots = self.0.freed.wait_timeout(slots, left).unwrap_or_else(PoisonError::into_inner).0;
                    continue;
                }
                Some((seen, State::Abandoned { mount })) => {
                    drop(slots);
                    let now = mount_of(path);
                    slots = self.lock();
                    if slots.by_path.get(path).is_some_and(|s| s.ticket == seen) && now == mount {
                        return None;
                    }
                    if slots.by_path.get(path).is_some_and(|s| s.ticket != seen) {
                        continue;
                    }
                }
            }
            slots.tickets += 1;
            let ticket = slots.tickets;
            slots.by_path.insert(path.to_owned(), Slot { ticket, state: State::Asking });
            return Some(ticket);
        }
    }

    fn abandon(&self, path: &Path, ticket: u64) {
        let mount = mount_of(path);
        if let Some(slot) = self.lock().by_path.get_mut(path).filter(|s| s.ticket == ticket) {
            slot.state = State::Abandoned { mount };
        }
        self.0.freed.notify_all();
    }
}

/// The mount that holds the path, without touching the path.
fn mount_of(path: &Path) -> Option<u64> {
    mount::table_of("/proc/self/mountinfo".as_ref()).ok()?.containing(path).map(|e| e.id)
}

#[cfg(test)]
mod tests {
    use std::sync::atomic::{AtomicU32, Ordering};

    use super::*;

    #[test]
    fn an_answer_within_the_bound_is_given() {
        let probes = Probes::default();
        let path = Path::new("/a");
        assert_eq!(probes.ask(path, Duration::from_secs(10), || 7).unwrap(), Some(7));
        assert_eq!(
            probes.ask(path, Duration::from_secs(10), || 8).unwrap(),
            Some(8),
            "the path is free again"
        );
    }

    #[test]
    fn a_path_that_hangs_costs_one_thread_however_often_it_is_asked() {
        let probes = Probes::default();
        let path = Path::new("/a");
        let (_keep, never) = mpsc::channel::<()>();
        let started = Arc::new(AtomicU32::new(0));
        let count = started.clone();
        let hang = move || {
            count.fetch_add(1, Ordering::SeqCst);
            let _ = never.recv_timeout(Duration::from_secs(60));
        };
        assert_eq!(probes.ask(path, Duration::from_millis(20), hang).unwrap(), None);
        for _ in 0..50 {
            let count = started.clone();
            let again = move || {
                count.fetch_add(1, Ordering::SeqCst);
            };
            // A bound that no test would survive: the answer must come at once.
            assert_eq!(probes.ask(path, Duration::from_secs(3600), again).unwrap(), None);
        }
        assert_eq!(started.load(Ordering::SeqCst), 1);
        assert_eq!(
            probes.ask(Path::new("/b"), Duration::from_secs(10), || 1).unwrap(),
            Some(1),
            "others are free"
        );
    }

    #[test]
    fn a_path_that_answers_late_can_be_asked_again() {
        let probes = Probes::default();
        let path = Path::new("/a");
        let (go, wait) = mpsc::channel::<()>();
        let slow = move || {
            let _ = wait.recv_timeout(Duration::from_secs(60));
        };
        assert_eq!(probes.ask(path, Duration::from_millis(20), slow).unwrap(), None);
        go.send(()).unwrap();
        let freed = (0..1000).any(|_| {
            std::thread::sleep(Duration::from_millis(10));
            probes.ask(path, Duration::from_secs(10), || 1).unwrap() == Some(1)
        });
        assert!(freed);
    }

    #[test]
    fn one_who_asks_while_another_question_is_in_time_gets_an_answer() {
        let probes = Probes::default();
        let answers: Vec<_> = std::thread::scope(|scope| {
            (0..8)
                .map(|n| {
                    let probes = probes.clone();
                    scope.spawn(move || {
                        probes.ask(Path::new("/a"), Duration::from_secs(30), move || n).unwrap()
                    })
                })
                .collect::<Vec<_>>()
                .into_iter()
                .map(|t| t.join().unwrap())
                .collect()
        });
        assert_eq!(answers, (0..8).map(Some).collect::<Vec<_>>());
    }

    #[test]
    fn a_question_that_panics_frees_its_path() {
        let probes = Probes::default();
        let path = Path::new("/a");
        let hook = |_: ()| -> u32 { std::panic::resume_unwind(Box::new("no message")) };
        assert_eq!(probes.ask(path, Duration::from_secs(30), move || hook(())).unwrap(), None);
        assert_eq!(probes.ask(path, Duration::from_secs(30), || 1).unwrap(), Some(1));
    }
}
