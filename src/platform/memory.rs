//! The C library's allocator: what is freed goes back to the system.
//!
//! glibc makes an arena for each few threads, up to eight for each processor (mallopt(3), `M_ARENA_MAX`), and keeps in each what
//! was freed. An agent has many threads now and then, and a leader reads long lists at its start: both would stay in its
//! resident memory for ever. Other C libraries do neither, and nothing is done there.

#![allow(unsafe_code)]

/// Arenas at most: the agent allocates little at the same time.
#[cfg(target_env = "gnu")]
const ARENAS: libc::c_int = 2;

/// Bounds how much memory threads hold apart from each other. For the start of a program, before its threads.
pub fn bound_arenas() {
    #[cfg(target_env = "gnu")]
    // SAFETY: mallopt(3) takes two numbers and changes the allocator's settings under its own lock.
    unsafe {
        // It fails for parameters that it does not know only; then all is as it was.
        libc::mallopt(libc::M_ARENA_MAX, ARENAS);
    }
}

/// Gives the pages that hold nothing back to the system (malloc_trim(3)). Takes milliseconds.
pub fn give_back() {
    #[cfg(target_env = "gnu")]
    // SAFETY: malloc_trim(3) takes a number and releases only pages that nothing was allocated in, under the locks of
    // the arenas.
    unsafe {
        libc::malloc_trim(0);
    }
}

#[cfg(test)]
#[cfg(target_env = "gnu")]
mod tests {
    use super::*;

    fn resident() -> u64 {
        let pages = std::fs::read_to_string("/proc/self/statm").unwrap();
        pages.split(' ').nth(1).unwrap().parse().unwrap()
    }

    #[test]
    fn what_was_freed_between_what_is_kept_goes_back() {
        // Too small for a mapping of their own, and every other one stays: nothing at the end of the heap is free.
        let mut all: Vec<Option<Box<[u8]>>> =
            (0..8192).map(|i: u32| Some(vec![i.to_le_bytes()[0]; 16 << 10].into())).collect();
        let full = resident();
        for one in all.iter_mut().step_by(2) {
            *one = None;
        }
        give_back();
        let pages_freed = (8192 / 2) * 4;
        // Other tests allocate meanwhile.
        assert!(resident() + pages_freed / 4 < full, "{full} pages before, {} now", resident());
        drop(all);
    }
}
