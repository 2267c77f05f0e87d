//! The same work for many, a few at a time.

/// Runs `work` on each item, at most `limit` at a time; the results in the items' order.
pub(super) fn parallel<T: Sync, R: Send>(items: &[T], limit: usize, work: impl Fn(&T) -> R + Sync) -> Vec<R> {
    let next = std::sync::atomic::AtomicUsize::new(0);
    let run = || {
        let mut done = Vec::new();
        while let Some((index, item)) = {
            let index = next.fetch_add(1, std::sync::atomic::Ordering::Relaxed);
            items.get(index).map(|item| (index, item))
        } {
            done.push((index, work(item)));
        }
        done
    };
    let mut done = std::thread::scope(|scope| {
        // One item's work needs no thread of its own: this one does it.
        let helpers: Vec<_> = (1..limit.min(items.len())).map(|_| scope.spawn(run)).collect();
        let mut done = run();
        for helper in helpers {
            match helper.join() {
                Ok(more) => done.extend(more),
                Err(panic) => std::panic::resume_unwind(panic),
            }
        }
        done
    });
    done.sort_by_key(|(index, _)| *index);
    done.into_iter().map(|(_, result)| result).collect()
}
