//! Random operations on a volume against a trivial model of a tree of files.
//!
//! After each operation the tree through the union is the model's, and every file lies whole on exactly one plain branch.

use std::collections::BTreeMap;
use std::fs;
use std::io::{Seek, SeekFrom, Write};
use std::path::{Path, PathBuf};

use nix::sys::signal::Signal;
use union_csi::platform::Host;

use super::rig::{DIRECTORY, IMAGE, Rig, Vol};
use crate::support::signal;

/// A file's content, or a directory.
#[derive(Clone, Debug, PartialEq, Eq)]
enum Node {
    File(Vec<u8>),
    Directory,
}

type Tree = BTreeMap<PathBuf, Node>;

/// xorshift64*, as good as any for choosing the next operation.
struct Dice(u64);

impl Dice {
    fn below(&mut self, n: usize) -> usize {
        self.0 ^= self.0 >> 12;
        self.0 ^= self.0 << 25;
        self.0 ^= self.0 >> 27;
        let roll = self.0.wrapping_mul(0x2545_F491_4F6C_DD1D) >> 33;
        usize::try_from(roll).expect("31 bits") % n
    }

    fn pick<'a, T>(&mut self, all: &'a [T]) -> Option<&'a T> {
        if all.is_empty() { None } else { Some(&all[self.below(all.len())]) }
    }

    fn content(&mut self) -> Vec<u8> {
        let length = [0, 1, 100, 4096, 70_000][self.below(5)];
        (0..length).map(|_| u8::try_from(self.below(256)).expect("a byte")).collect()
    }
}

fn files(tree: &Tree) -> Vec<PathBuf> {
    tree.iter().filter(|(_, n)| matches!(n, Node::File(_))).map(|(p, _)| p.clone()).collect()
}

fn directories(tree: &Tree) -> Vec<PathBuf> {
    let below = tree.iter().filter(|(_, n)| **n == Node::Directory).map(|(p, _)| p.clone());
    std::iter::once(PathBuf::new()).chain(below).collect()
}

fn has_children(tree: &Tree, directory: &Path) -> bool {
    tree.keys().any(|p| p != directory && p.starts_with(directory))
}

/// One random operation, on the volume and on the model; its description.
fn operate(dice: &mut Dice, root: &Path, tree: &mut Tree) -> String {
    let name = format!("n{}", dice.below(12));
    let parent = dice.pick(&directories(tree)).cloned().unwrap_or_default();
    let path = parent.join(name);
    let file = dice.pick(&files(tree)).cloned();
    match (dice.below(8), file) {
        (0, _) => {
            let made = fs::create_dir(root.join(&path));
            assert_eq!(made.is_ok(), !tree.contains_key(&path), "mkdir {path:?}: {made:?}");
            tree.entry(path.clone()).or_insert(Node::Directory);
            format!("mkdir {path:?}")
        }
        (1, Some(file)) => {
            fs::remove_file(root.join(&file)).expect("unlink");
            tree.remove(&file);
            format!("unlink {file:?}")
        }
        (2, Some(file)) => {
            let renamed = fs::rename(root.join(&file), root.join(&path));
            let onto_directory = tree.get(&path) == Some(&Node::Directory);
            assert_eq!(renamed.is_ok(), !onto_directory, "rename {file:?} to {path:?}: {renamed:?}");
            if !onto_directory && let Some(node) = tree.remove(&file) {
                tree.insert(path.clone(), node);
            }
            format!("rename {file:?} to {path:?}")
        }
        (3, Some(file)) => {
            let (offset, more) = (dice.below(5000), dice.content());
            let mut open = fs::OpenOptions::new().write(true).open(root.join(&file)).expect("open");
            open.seek(SeekFrom::Start(u64::try_from(offset).expect("small"))).expect("seek");
            open.write_all(&more).expect("write");
            if let Some(Node::File(content)) = tree.get_mut(&file)
                && !more.is_empty()
            {
                content.resize(content.len().max(offset + more.len()), 0);
                content[offset..offset + more.len()].copy_from_slice(&more);
            }
            format!("write {} at {offset} of {file:?}", more.len())
        }
        (4, Some(file)) => {
            let length = dice.below(9000);
            let open = fs::OpenOptions::new().write(true).open(root.join(&file)).expect("open");
            open.set_len(u64::try_from(length).expect("small")).expect("truncate");
            if let Some(Node::File(content)) = tree.get_mut(&file) {
                content.resize(length, 0);
            }
            format!("truncate {file:?} to {length}")
        }
        (5, _) => {
            let Some(directory) = dice.pick(&directories(tree)[1..]).cloned() else {
                return "nothing".to_owned();
            };
            let removed = fs::remove_dir(root.join(&directory));
            assert_eq!(removed.is_ok(), !has_children(tree, &directory), "rmdir {directory:?}: {removed:?}");
            if removed.is_ok() {
                tree.remove(&directory);
            }
            format!("rmdir {directory:?}")
        }
        _ => {
            let content = dice.content();
            let written = fs::write(root.join(&path), &content);
            let onto_directory = tree.get(&path) == Some(&Node::Directory);
            assert_eq!(written.is_ok(), !onto_directory, "write {path:?}: {written:?}");
            if !onto_directory {
                tree.insert(path.clone(), Node::File(content));
            }
            format!("write {path:?}")
        }
    }
}

/// The tree below a directory, as it is.
fn read_tree(root: &Path) -> Tree {
    fn descend(root: &Path, below: &Path, tree: &mut Tree) {
        for entry in fs::read_dir(root.join(below)).expect("list") {
            let entry = entry.expect("entry");
            let path = below.join(entry.file_name());
            if entry.file_type().expect("type").is_dir() {
                tree.insert(path.clone(), Node::Directory);
                descend(root, &path, tree);
            } else {
                tree.insert(path.clone(), Node::File(fs::read(entry.path()).expect("read")));
            }
        }
    }
    let mut tree = Tree::new();
    descend(root, Path::new(""), &mut tree);
    tree
}

fn check(rig: &Rig, vol: &Vol, tree: &Tree, branches: u32, after: &str) {
    let union = read_tree(&vol.target);
    assert!(union == *tree, "after {after}: {:?} is not {:?}", union.keys(), tree.keys());
    let plain: Vec<Tree> = (0..branches).map(|i| read_tree(&rig.branch_mount(vol, i).join("data"))).collect();
    for (path, node) in tree {
        let holders: Vec<_> = plain.iter().filter_map(|p| p.get(path)).collect();
        match node {
            Node::File(_) => assert!(holders == [node], "after {after}: {path:?} is not whole on one branch"),
            Node::Directory => assert!(holders.contains(&node), "after {after}: {path:?} is on no branch"),
        }
    }
    for path in plain.iter().flat_map(BTreeMap::keys) {
        assert!(tree.contains_key(path), "after {after}: {path:?} is on a branch only");
    }
}

#[tokio::test(flavor = "multi_thread")]
async fn volume_behaves_as_one_tree_of_files_whatever_happens_to_its_agent_and_its_mergerfs() {
    let mut rig = Rig::new(&["a", "b", "c"]);
    let vol = rig.volume(&[("a", 48, IMAGE), ("b", 48, DIRECTORY), ("c", 64, IMAGE)]).await;
    rig.up(&vol).await;
    let mut tree = Tree::new();
    let mut dice = Dice(0x5EED_0BAD_CAFE);
    for step in 0..600 {
        let event = match dice.below(60) {
            0 => {
                signal(rig.pid(&vol).await, Signal::SIGKILL);
                rig.volumes.stage(&vol.stage()).await.expect("repaired");
                "mergerfs was killed".to_owned()
            }
            1 => {
                rig.restart(&Host::new()).await;
                rig.volumes.recover().await;
                "another agent".to_owned()
            }
            2 => {
                rig.down(&vol).await;
                rig.up(&vol).await;
                "down and up".to_owned()
            }
            _ => operate(&mut dice, &vol.target, &mut tree),
        };
        check(&rig, &vol, &tree, 3, &format!("step {step}, {event}"));
    }
    assert!(tree.len() > 5, "the dice left something to compare");
    rig.down(&vol).await;
    rig.assert_nothing_left();
}
