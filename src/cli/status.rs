//! `union-csi status`: this node's disks and all volumes on one screen.

use super::client::AgentArgs;
use super::draw::{self, Cell, Tone};
use super::output::{Look, Out};
use super::{CliError, DONE, Format};
use crate::domain::Bytes;
use crate::domain::pool::{Media, PoolState, PoolView};
use crate::domain::reach::{StorageNetwork, TransportReport};
use crate::domain::union::UnionKind;
use crate::http::api::{Standing, Status, VolumeView};

#[derive(Debug, clap::Args)]
#[command(after_help = "Examples:\n  \
    union-csi status\n  \
    union-csi status --output json\n  \
    union-csi status --agent http://10.0.0.7:9830")]
pub(super) struct Args {
    #[command(flatten)]
    agent: AgentArgs,
    /// How to answer
    #[arg(long, short, value_enum, default_value_t)]
    output: Format,
}

pub(super) fn run(args: &Args, out: &mut Out) -> Result<u8, CliError> {
    let status: Status = args.agent.get("/v1/status")?;
    let volumes: Vec<VolumeView> = args.agent.get("/v1/volumes")?;
    match args.output {
        Format::Text => out.print(&text(out.look, &status, &volumes))?,
        Format::Json => out.json(&serde_json::json!({ "status": status, "volumes": volumes }))?,
    }
    Ok(DONE)
}

/// The screen.
pub(super) fn text(look: Look, status: &Status, volumes: &[VolumeView]) -> String {
    let mut screen = header(look, status);
    screen.push('\n');
    if status.pools.is_empty() {
        screen.push_str("No pools: this node mounts volumes and gives no space. `union-csi pools discover` proposes some.\n");
    } else {
        screen.push_str(&pools(look, &status.pools));
    }
    screen.push('\n');
    if volumes.is_empty() {
        screen.push_str("No volumes.\n");
    } else {
        screen.push_str(&table(look, volumes));
    }
    screen
}

fn header(look: Look, status: &Status) -> String {
    let ready =
        if status.ready { look.paint(Tone::Good, "ready") } else { look.paint(Tone::Bad, "not ready") };
    let union = match (&status.abilities.mergerfs_version, status.abilities.passthrough) {
        (Some(version), true) => format!("mergerfs {version} with passthrough"),
        (Some(version), false) => format!("mergerfs {version}"),
        (None, _) => "no mergerfs".to_owned(),
    };
    let node = look.paint(Tone::Strong, status.node.as_str());
    let about = format!("Union CSI {}, {union}", status.version);
    let beside = status.node.as_str().chars().count() + about.chars().count() + "  not ready  ".len();
    let gap = if beside > look.width { "\n" } else { "  " };
    let mut out = format!("{node}  {ready}{gap}{about}\n");
    for problem in &status.problems {
        out.push_str(&notice(look, Tone::Bad, problem));
    }
    let volumes = &status.volumes;
    let attention = match volumes.abnormal {
        0 => String::new(),
        1 => ", 1 needs attention".to_owned(),
        n => format!(", {n} need attention"),
    };
    let s = if volumes.total == 1 { "" } else { "s" };
    let counted = format!("{} volume{s} of {}{attention}", volumes.total, draw::size(volumes.capacity));
    out.push_str(&counted);
    out.push('\n');
    out.push_str(&standing(&status.standing));
    if let Some(place) = &status.network {
        out.push_str(&network(look, place, &status.transports));
    }
    out
}

/// Where other nodes reach this one and by what, in a line; and what is wrong with that.
fn network(look: Look, place: &StorageNetwork, transports: &[TransportReport]) -> String {
    let speed = match place.megabits {
        None => String::new(),
        Some(megabits) if megabits % 1000 == 0 => format!(" at {} Gbit/s", megabits / 1000),
        Some(megabits) => format!(" at {megabits} Mbit/s"),
    };
    let here = match (place.interface.as_str(), place.addresses.join(", ").as_str()) {
        ("", _) => "none found".to_owned(),
        (interface, "") => format!("{interface} without an address"),
        (interface, addresses) => format!("{addresses} on {interface}{speed}"),
    };
    let carried = transports.iter().map(|report| match (report.owner.able, report.consumer.able) {
        (true, true) => format!("; {} serves and attaches", report.transport),
        (true, false) => format!("; {} serves", report.transport),
        (false, true) => format!("; {} attaches", report.transport),
        (false, false) => format!("; no {}", report.transport),
    });
    let line = format!("Network: {here}{}", carried.collect::<String>());
    let mut out = draw::wrap(&line, look.width.saturating_sub(2)).join("\n  ");
    out.push('\n');
    if !place.problem.is_empty() {
        out.push_str(&notice(look, Tone::Bad, &place.problem));
    }
    out
}

/// Who leads, in one line; nothing where there is only this node, or an older agent does not tell.
fn standing(standing: &Standing) -> String {
    if standing.store != "kubernetes" {
        return String::new();
    }
    let leader = match (&standing.leader, standing.leads) {
        (_, true) => "this node leads".to_owned(),
        (Some(leader), false) => format!("{leader} leads"),
        (None, false) if standing.mode == "node" => "this node never leads".to_owned(),
        (None, false) => "nobody leads".to_owned(),
    };
    let mode = if standing.mode == "all" { String::new() } else { format!(", mode {}", standing.mode) };
    format!("Kubernetes: {leader}{mode}\n")
}

/// A sentence that wants attention, on as many lines as it takes.
pub(super) fn notice(look: Look, tone: Tone, text: &str) -> String {
    let lines = draw::wrap(text, look.width.saturating_sub(2));
    format!("{} {}\n", look.paint(tone, "!"), lines.join("\n  "))
}

fn media(media: Media) -> &'static str {
    match media {
        Media::Nvme => "nvme",
        Media::Ssd => "ssd",
        Media::Hdd => "hdd",
        Media::Unknown => "-",
    }
}

/// A bar for each disk.
pub(super) fn pools(look: Look, views: &[PoolView]) -> String {
    let nodes: std::collections::BTreeSet<_> = views.iter().map(|v| &v.node).collect();
    let label = |v: &PoolView| {
        if nodes.len() > 1 { format!("{}/{}", v.node, v.pool.name) } else { v.pool.name.to_string() }
    };
    let longest = views.iter().map(|v| label(v).chars().count()).max().unwrap_or(0).clamp(4, 24);
    // Name, media and two figures of at most nine signs, each two apart; the bar takes the rest.
    let room = look.width.saturating_sub(longest + 5 + 2 * 9 + 4 * 2 + 1);
    let bar = room.clamp(10, 80);
    let head = [
        Cell::left("DISK"),
        Cell::left("MEDIA"),
        Cell::drawn("SPACE".to_owned(), 5),
        Cell::right("AVAILABLE"),
        Cell::right("OF"),
    ];
    let mut notes = String::new();
    let mut rows = Vec::new();
    for view in views {
        let pool = &view.pool;
        let name = draw::fit(&label(view), longest);
        if pool.state != PoolState::Ready {
            let state = draw::pool_state(pool.state);
            notes.push_str(&notice(look, Tone::Bad, &format!("{}: {}", label(view), pool.message)));
            if pool.total.is_zero() {
                let cell = Cell::drawn(look.paint(Tone::Bad, state), state.len());
                rows.push(vec![
                    Cell::left(name),
                    Cell::left(media(pool.media)),
                    cell,
                    Cell::right("-"),
                    Cell::right("-"),
                ]);
                continue;
            }
        }
        rows.push(vec![
            Cell::left(name),
            Cell::left(media(pool.media)),
            Cell::drawn(draw::disk_bar(look, pool, bar), bar),
            Cell::right(draw::size(pool.allocatable())),
            Cell::right(draw::size(pool.total)),
        ]);
    }
    let mut out = draw::table(look, &head, &rows);
    out.push_str(&format!("{}\n{notes}", draw::disk_legend(look)));
    out
}

/// A line for each volume.
pub(super) fn table(look: Look, volumes: &[VolumeView]) -> String {
    let narrow = look.width < 80;
    let bar = if narrow { 8 } else { 16 };
    let mut head = vec![
        Cell::left("VOLUME"),
        Cell::right("SIZE"),
        Cell::drawn("USED".to_owned(), 4),
        Cell::right("BRANCHES"),
        Cell::left("HEALTH"),
    ];
    if !narrow {
        head.insert(4, Cell::left("KIND"));
    }
    let mut notes = String::new();
    let mut rows = Vec::new();
    for volume in volumes {
        let (word, tone) = draw::health(volume.state);
        let used = match volume.local.as_ref().and_then(|l| l.space) {
            Some(space) => {
                let percent = u128::from(space.used) * 100 / u128::from(space.total.max(1));
                let drawn = draw::fill_bar(look, space.used, space.total, bar);
                Cell::drawn(format!("{drawn} {percent:>3}%"), bar + 5)
            }
            None => Cell::drawn(look.paint(Tone::Soft, "not mounted here"), 16),
        };
        let mut row = vec![
            Cell::left(name(volume)),
            Cell::right(draw::size(capacity(volume))),
            used,
            Cell::right(volume.branches.len().to_string()),
            Cell::left(word).tone(tone),
        ];
        if !narrow {
            row.insert(4, Cell::left(volume.local.as_ref().map_or("-", |l| kind(l.union))));
        }
        rows.push(row);
        if tone == Tone::Bad || tone == Tone::Wait {
            let told =
                draw::fit(&format!("{}: {}", name(volume), volume.message), look.width.saturating_sub(2) * 3);
            notes.push_str(&format!("{} {told}\n", look.paint(tone, "!")));
        }
    }
    draw::table(look, &head, &rows) + &notes
}

/// The name that people know a volume by.
pub(super) fn name(volume: &VolumeView) -> String {
    let text = if volume.request_name.is_empty() { volume.id.as_str() } else { &volume.request_name };
    draw::fit(text, 64)
}

fn capacity(volume: &VolumeView) -> Bytes {
    if volume.capacity.is_zero() { volume.requested } else { volume.capacity }
}

/// The word for what serves a volume.
pub(super) const fn kind(union: UnionKind) -> &'static str {
    match union {
        UnionKind::Bind => "bind",
        UnionKind::Overlay => "overlay",
        UnionKind::Mergerfs => "mergerfs",
        UnionKind::Block => "block",
    }
}
