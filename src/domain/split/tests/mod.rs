//! Examples that read as sentences; `properties` holds for any input, `brute` compares with trying everything.

mod brute;
mod examples;
mod network;
mod properties;

use proptest::prelude::*;
use proptest::strategy::Strategy as _;

use super::space::Overhead;
use super::*;
use crate::domain::policy::{FormatChoice, Placement, Strategy};
use crate::domain::pool::{Enforcement, PoolReport, PoolState};

/// A pool that can be used, with `allocatable` bytes, whose directories cannot be enforced.
fn pool(node: &str, name: &str, allocatable: Bytes) -> PoolView {
    let pool: PoolReport = serde_json::from_value(serde_json::json!({
        "name": name, "total": Bytes::MAX, "free": Bytes::MAX, "allocatable": allocatable,
    }))
    .unwrap();
    PoolView { node: node.parse().unwrap(), node_labels: Default::default(), pool }
}

/// The same with enforced directories.
fn enforced(node: &str, name: &str, allocatable: Bytes) -> PoolView {
    let mut view = pool(node, name, allocatable);
    view.pool.enforcement = Enforcement::ProjectQuota;
    view
}

fn request(size: Bytes) -> Request {
    Request {
        size,
        limit: None,
        mode: VolumeMode::Filesystem,
        consumer: None,
        topology: Vec::new(),
        reach: Reach::AnyNode,
        sharing: Sharing::Exclusive,
    }
}

/// Overheads of several characters.
#[derive(Clone, Copy, Debug)]
enum Shape {
    /// Nothing is taken.
    Nothing,
    /// A fixed part and a share.
    Linear,
    /// Flat stretches and jumps.
    Stairs,
    /// The product's own.
    Product,
}

impl Overhead for Shape {
    fn usable(&self, size: Bytes, fs: Option<FsType>) -> Bytes {
        if fs.is_none() {
            return size;
        }
        match self {
            Self::Nothing => size,
            Self::Linear => Bytes::new(size.get() - size.get() / 16).saturating_sub(Bytes::new(2000)),
            Self::Stairs => {
                let stair = size.get() / 12_288 * 12_288;
                Bytes::new(stair.max((size.get() / 2).saturating_sub(4096)).saturating_sub(3000))
            }
            Self::Product => super::space::Real.usable(size, fs),
        }
    }

    fn size_for(&self, wanted: Bytes, fs: Option<FsType>) -> Option<Bytes> {
        if fs.is_none() {
            return Some(wanted);
        }
        if let Self::Product = self {
            return super::space::Real.size_for(wanted, fs);
        }
        let (mut low, mut high) = (0, u64::MAX / 2);
        if self.usable(Bytes::new(high), fs) < wanted {
            return None;
        }
        while low < high {
            let middle = low + (high - low) / 2;
            if self.usable(Bytes::new(middle), fs) >= wanted {
                high = middle;
            } else {
                low = middle + 1;
            }
        }
        Some(Bytes::new(low))
    }

    fn minimum(&self, fs: Option<FsType>) -> Bytes {
        match (self, fs) {
            (Self::Product, _) => super::space::Real.minimum(fs),
            (_, None) => Bytes::new(4096),
            (_, Some(_)) => Bytes::new(5000),
        }
    }
}

fn strategies() -> impl proptest::strategy::Strategy<Value = Strategy> {
    prop_oneof![Just(Strategy::Fewest), Just(Strategy::Balanced), Just(Strategy::Spread)]
}

fn placements() -> impl proptest::strategy::Strategy<Value = Placement> {
    prop_oneof![Just(Placement::Local), Just(Placement::PreferLocal), Just(Placement::Any)]
}

fn formats() -> impl proptest::strategy::Strategy<Value = FormatChoice> {
    prop_oneof![
        2 => Just(FormatChoice::Auto),
        1 => Just(FormatChoice::Image),
        1 => Just(FormatChoice::Directory)
    ]
}

fn sharings() -> impl proptest::strategy::Strategy<Value = Sharing> {
    prop_oneof![
        3 => Just(Sharing::Exclusive),
        1 => Just(Sharing::ManyReaders),
        1 => Just(Sharing::ManyWriters)
    ]
}

prop_compose! {
    /// Up to `most` pools on three nodes with up to `room` bytes each; some share a filesystem, some cannot be used.
    fn pools(most: usize, room: u64, quantum: u64)(
        rows in prop::collection::vec(
            (0_usize..3, 0_usize..8, 0_u64..=room, any::<bool>(), prop::bool::weighted(0.9), any::<bool>()),
            0..=most,
        )
    ) -> Vec<PoolView> {
        rows.into_iter().enumerate().map(|(i, (node, device, room, enforces, ready, whole))| {
            // Whole quanta are as likely as odd sizes.
            let room = if whole { room / quantum * quantum } else { room };
            let mut view = pool(&format!("n{node}"), &format!("p{i}"), Bytes::new(room));
            view.pool.device = if device < 3 { format!("d{device}") } else { String::new() };
            if enforces { view.pool.enforcement = Enforcement::ProjectQuota; }
            if !ready { view.pool.state = PoolState::Absent; }
            view
        }).collect()
    }
}

fn shapes() -> impl proptest::strategy::Strategy<Value = Shape> {
    prop_oneof![Just(Shape::Nothing), Just(Shape::Linear), Just(Shape::Stairs)]
}
