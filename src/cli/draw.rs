//! Tables and bars in text. Pure: what comes out depends on the values and the [`Look`] only.

use super::output::Look;
use crate::domain::Bytes;
use crate::domain::pool::{PoolReport, PoolState};
use crate::http::api::HealthState;

/// What a piece of text is about; becomes a colour where colours are shown.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub(super) enum Tone {
    Plain,
    Strong,
    Soft,
    Good,
    Wait,
    Bad,
    Ours,
    Written,
}

impl Look {
    /// The text in its tone (ECMA-48, SGR).
    pub(super) fn paint(self, tone: Tone, text: &str) -> String {
        let code = match tone {
            Tone::Plain => "",
            Tone::Strong => "1",
            Tone::Soft => "2",
            Tone::Good => "32",
            Tone::Wait => "33",
            Tone::Bad => "31",
            Tone::Ours => "36",
            Tone::Written => "34",
        };
        if !self.colour || code.is_empty() || text.is_empty() {
            return text.to_owned();
        }
        format!("\x1b[{code}m{text}\x1b[0m")
    }
}

/// The word and tone of a volume's state.
pub(super) const fn health(state: HealthState) -> (&'static str, Tone) {
    match state {
        HealthState::Healthy => ("healthy", Tone::Good),
        HealthState::Pending => ("pending", Tone::Wait),
        HealthState::Abnormal => ("attention", Tone::Bad),
        HealthState::Deleting => ("deleting", Tone::Wait),
    }
}

/// The word of a pool's state.
pub(super) const fn pool_state(state: PoolState) -> &'static str {
    match state {
        PoolState::Ready => "ready",
        PoolState::Absent => "absent",
        PoolState::ReadOnly => "read-only",
    }
}

/// An amount for people.
pub(super) fn size(bytes: Bytes) -> String {
    bytes.human()
}

/// At most `width` characters: the middle of a longer text gives way, since names differ at both ends. Control characters
/// are shown as such, so that a name cannot move the cursor.
pub(super) fn fit(text: &str, width: usize) -> String {
    let text: Vec<char> = text.chars().map(|c| if c.is_control() { '\u{fffd}' } else { c }).collect();
    if text.len() <= width {
        return text.into_iter().collect();
    }
    let Some(room) = width.checked_sub(1) else { return String::new() };
    let tail = room / 2;
    let head = room - tail;
    let end = text.len() - tail;
    text[..head].iter().chain(&['…']).chain(&text[end..]).collect()
}

/// A cell of a table.
#[derive(Clone, Debug)]
pub(super) struct Cell {
    pub(super) text: String,
    pub(super) tone: Tone,
    right: bool,
    /// Holds colours of its own and takes so many columns.
    drawn: Option<usize>,
}

impl Cell {
    pub(super) fn left(text: impl Into<String>) -> Self {
        Self { text: text.into(), tone: Tone::Plain, right: false, drawn: None }
    }

    pub(super) fn right(text: impl Into<String>) -> Self {
        Self { right: true, ..Self::left(text) }
    }

    /// A bar, `width` columns wide.
    pub(super) fn drawn(text: String, width: usize) -> Self {
        Self { drawn: Some(width), ..Self::left(text) }
    }

    pub(super) fn tone(self, tone: Tone) -> Self {
        Self { tone, ..self }
    }

    fn width(&self) -> usize {
        self.drawn.unwrap_or_else(|| self.text.chars().count())
    }
}

/// Rows below each other, columns two apart, none wider than the look allows: the widest text column gives way first.
pub(super) fn table(look: Look, head: &[Cell], rows: &[Vec<Cell>]) -> String {
    let columns = head.len();
    let mut widths: Vec<usize> = (0..columns)
        .map(|i| {
            rows.iter().chain([&head.to_vec()]).filter_map(|r| r.get(i)).map(Cell::width).max().unwrap_or(0)
        })
        .collect();
    let gaps = 2 * columns.saturating_sub(1);
    let fixed = |i: usize| rows.iter().any(|r| r.get(i).is_some_and(|c| c.drawn.is_some() || c.right));
    while widths.iter().sum::<usize>() + gaps > look.width {
        let widest =
            (0..columns).filter(|i| !fixed(*i) && widths[*i] > MIN_COLUMN).max_by_key(|i| widths[*i]);
        let Some(widest) = widest else { break };
        widths[widest] -= 1;
    }
    let mut out = String::new();
    let soft: Vec<Cell> = head.iter().map(|c| c.clone().tone(Tone::Soft)).collect();
    for row in [&soft].into_iter().chain(rows) {
        let mut line = String::new();
        let mut more = Vec::new();
        for (i, (cell, width)) in row.iter().zip(&widths).enumerate() {
            // The last column is where sentences stand: it goes on below, the others are cut.
            let text = match cell.drawn {
                Some(_) => cell.text.clone(),
                None if i + 1 == columns => {
                    let mut lines = wrap(&cell.text, *width).into_iter();
                    let first = lines.next().unwrap_or_default();
                    more = lines.collect();
                    first
                }
                None => fit(&cell.text, *width),
            };
            let used = cell.drawn.unwrap_or_else(|| text.chars().count());
            let pad = " ".repeat(width.saturating_sub(used));
            let painted = look.paint(cell.tone, &text);
            let (before, after) = if cell.right { (pad.as_str(), "") } else { ("", pad.as_str()) };
            line.push_str(if i == 0 { "" } else { "  " });
            line.push_str(before);
            line.push_str(&painted);
            line.push_str(after);
        }
        out.push_str(line.trim_end());
        out.push('\n');
        let indent = widths[..columns - 1].iter().sum::<usize>() + gaps;
        let tone = row.last().map_or(Tone::Plain, |cell| cell.tone);
        for line in more {
            out.push_str(&format!("{:indent$}{}\n", "", look.paint(tone, &line)));
        }
    }
    out
}

/// The text in lines of at most `width` signs, broken between words where that can be.
pub(super) fn wrap(text: &str, width: usize) -> Vec<String> {
    let mut lines: Vec<String> = Vec::new();
    let mut line = String::new();
    for word in fit(text, usize::MAX).split_whitespace() {
        let mut word: Vec<char> = word.chars().collect();
        loop {
            let used = line.chars().count();
            let gap = usize::from(used > 0);
            if used + gap + word.len() <= width {
                line.push_str(if gap > 0 { " " } else { "" });
                line.extend(word);
                break;
            }
            if used == 0 {
                let rest = word.split_off(width.max(1));
                lines.push(word.into_iter().collect());
                word = rest;
            } else {
                lines.push(std::mem::take(&mut line));
            }
        }
    }
    if !line.is_empty() || lines.is_empty() {
        lines.push(line);
    }
    lines
}

/// No column becomes narrower to make room.
const MIN_COLUMN: usize = 6;

/// A disk as a bar: used by others, ours written, ours promised, free, reserve.
pub(super) fn disk_bar(look: Look, pool: &PoolReport, width: usize) -> String {
    let total = pool.total.get().max(1);
    let others = total.saturating_sub(pool.free.get()).saturating_sub(pool.occupied.get());
    let unwritten = pool.promised.saturating_sub(pool.occupied).get();
    let parts = [
        (others, '▒', Tone::Soft),
        (pool.occupied.get(), '█', Tone::Written),
        (unwritten, '▓', Tone::Ours),
        (
            total.saturating_sub(others + pool.promised.get().max(pool.occupied.get()) + pool.reserve.get()),
            '·',
            Tone::Soft,
        ),
        (pool.reserve.get(), '╱', Tone::Soft),
    ];
    segments(look, &parts, width)
}

/// The signs of [`disk_bar`], explained.
pub(super) fn disk_legend(look: Look) -> String {
    let parts = [
        ("▒", Tone::Soft, "others"),
        ("█", Tone::Written, "written"),
        ("▓", Tone::Ours, "promised"),
        ("·", Tone::Soft, "free"),
        ("╱", Tone::Soft, "reserve"),
    ];
    let shown: Vec<String> =
        parts.iter().map(|(sign, tone, word)| format!("{} {word}", look.paint(*tone, sign))).collect();
    shown.join("  ")
}

/// How full something is, as a bar.
pub(super) fn fill_bar(look: Look, used: u64, total: u64, width: usize) -> String {
    let tone = if total > 0 && used > total / 10 * 9 { Tone::Bad } else { Tone::Written };
    segments(look, &[(used.min(total), '█', tone), (total.saturating_sub(used), '·', Tone::Soft)], width)
}

/// Parts of a whole in `width` signs: rounded so that the signs add up, and nothing that is there is invisible.
fn segments(look: Look, parts: &[(u64, char, Tone)], width: usize) -> String {
    let whole: u128 = parts.iter().map(|(n, ..)| u128::from(*n)).sum::<u128>().max(1);
    let mut out = String::new();
    let mut counts: Vec<usize> = Vec::new();
    let mut passed: u128 = 0;
    let mut drawn = 0usize;
    for (n, ..) in parts {
        passed += u128::from(*n);
        let upto = usize::try_from(passed * width as u128 / whole).unwrap_or(width).min(width);
        counts.push(upto - drawn);
        drawn = upto;
    }
    for i in 0..counts.len() {
        if parts[i].0 > 0 && counts[i] == 0 {
            let widest = (0..counts.len()).max_by_key(|j| counts[*j]).filter(|j| counts[*j] > 1);
            if let Some(widest) = widest {
                counts[widest] -= 1;
                counts[i] += 1;
            }
        }
    }
    for ((_, sign, tone), count) in parts.iter().zip(counts) {
        out.push_str(&look.paint(*tone, &sign.to_string().repeat(count)));
    }
    out
}

#[cfg(test)]
mod tests {
    use super::*;

    const PLAIN: Look = Look { width: 100, colour: false };

    #[test]
    fn a_bar_has_its_width_and_shows_the_smallest_part() {
        for width in [10, 33, 80] {
            let bar = segments(
                PLAIN,
                &[(1, 'a', Tone::Plain), (1_000_000, 'b', Tone::Plain), (1, 'c', Tone::Plain)],
                width,
            );
            assert_eq!(bar.chars().count(), width);
            assert!(bar.starts_with('a') && bar.ends_with('c'), "{bar}");
        }
        assert_eq!(segments(PLAIN, &[(u64::MAX, 'a', Tone::Plain), (u64::MAX, 'b', Tone::Plain)], 4), "aabb");
    }

    #[test]
    fn long_names_keep_both_ends_and_cannot_move_the_cursor() {
        assert_eq!(fit("pvc-1234567890-end", 9), "pvc-…-end");
        assert_eq!(fit("short", 9), "short");
        assert_eq!(fit("a\x1b[2Jb", 9), "a\u{fffd}[2Jb");
    }

    #[test]
    fn sentences_go_on_below_and_lose_nothing() {
        assert_eq!(wrap("one two three", 8), ["one two", "three"]);
        assert_eq!(wrap("abcdefghij k", 4), ["abcd", "efgh", "ij k"]);
        assert_eq!(wrap("", 4), [""]);
    }

    #[test]
    fn without_a_terminal_there_are_no_colours() {
        assert_eq!(PLAIN.paint(Tone::Bad, "x"), "x");
        assert_eq!(Look { colour: true, ..PLAIN }.paint(Tone::Bad, "x"), "\x1b[31mx\x1b[0m");
    }
}
