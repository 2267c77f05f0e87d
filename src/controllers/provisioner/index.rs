//! The picture: claims, classes, PersistentVolumes and volumes as last told, by the name of the volume.

use std::collections::{BTreeSet, HashMap, HashSet};

use super::decide::Seen;
use super::objects::{Claim, Split, Volume};
use crate::controllers::class::Class;
use crate::store::object::Version;

#[derive(Debug, Default)]
pub(super) struct Index {
    /// By the name of their volume.
    claims: HashMap<String, Claim>,
    classes: HashMap<String, Class>,
    /// Class to the volumes of claims that have none yet.
    waiting: HashMap<String, BTreeSet<String>>,
    volumes: HashMap<String, Volume>,
    /// Handle to the PersistentVolumes that have it, where their name is another.
    by_handle: HashMap<String, BTreeSet<String>>,
    splits: HashMap<String, Split>,
}

impl Index {
    /// All that is known of one volume.
    pub(super) fn seen<'a>(&'a self, name: &'a str, held_back: bool) -> Seen<'a> {
        let claim = self.claims.get(name);
        let volume = self.volumes.get(name);
        let handle = volume.map_or(name, |volume| &volume.handle);
        Seen {
            name,
            claim,
            class: claim.and_then(|claim| self.classes.get(&claim.class)),
            volume,
            split: self.splits.get(handle),
            shared_with: volume.and_then(|volume| self.shared_with(volume)),
            held_back,
        }
    }

    /// The version of the `VolumeSplit` of a volume.
    pub(super) fn version(&self, name: &str) -> Option<Version> {
        self.seen(name, false).split.map(|split| split.version.clone())
    }

    fn shared_with(&self, volume: &Volume) -> Option<&str> {
        let namesake = self.volumes.get(&volume.handle).filter(|other| other.handle == volume.handle);
        let others = self.by_handle.get(&volume.handle).into_iter().flatten();
        namesake
            .map(|other| &other.name)
            .into_iter()
            .chain(others)
            .find(|name| **name != volume.name)
            .map(String::as_str)
    }

    /// All names that something is known of.
    pub(super) fn names(&self) -> HashSet<String> {
        self.claims.keys().chain(self.volumes.keys()).chain(self.splits.keys()).cloned().collect()
    }

    /// Takes what was told of a claim.
    pub(super) fn put_claim(&mut self, name: String, claim: Claim) {
        self.forget_waiting(&name);
        if claim.volume.is_empty() {
            self.waiting.entry(claim.class.clone()).or_default().insert(name.clone());
        }
        self.claims.insert(name, claim);
    }

    /// A claim is gone.
    pub(super) fn remove_claim(&mut self, name: &str) {
        self.forget_waiting(name);
        self.claims.remove(name);
    }

    fn forget_waiting(&mut self, name: &str) {
        let Some(class) = self.claims.get(name).map(|claim| &claim.class) else { return };
        if let Some(names) = self.waiting.get_mut(class) {
            names.remove(name);
            if names.is_empty() {
                self.waiting.remove(class);
            }
        }
    }

    /// Takes what was told of a class; the volumes whose claims wait are returned.
    pub(super) fn put_class(&mut self, name: String, class: Class) -> Vec<String> {
        let waiting = self.waiting.get(&name).into_iter().flatten().cloned().collect();
        match self.classes.insert(name, class.clone()) {
            Some(before) if before == class => Vec::new(),
            _ => waiting,
        }
    }

    /// A class is gone; the volumes whose claims wait are returned.
    pub(super) fn remove_class(&mut self, name: &str) -> Vec<String> {
        match self.classes.remove(name) {
            Some(_) => self.waiting.get(name).into_iter().flatten().cloned().collect(),
            None => Vec::new(),
        }
    }

    /// Takes what was told of a PersistentVolume.
    pub(super) fn put_volume(&mut self, volume: Volume) -> Vec<String> {
        let mut concerned = self.remove_volume(&volume.name);
        if volume.handle != volume.name {
            self.by_handle.entry(volume.handle.clone()).or_default().insert(volume.name.clone());
        }
        concerned.push(volume.name.clone());
        self.volumes.insert(volume.name.clone(), volume);
        concerned
    }

    /// The protection of a PersistentVolume was taken away; what is told of it later counts.
    pub(super) fn unprotect(&mut self, name: &str) {
        if let Some(volume) = self.volumes.get_mut(name) {
            volume.protection = None;
        }
    }

    /// A PersistentVolume is gone; those that it may have stood in the way of are returned.
    pub(super) fn remove_volume(&mut self, name: &str) -> Vec<String> {
        let Some(volume) = self.volumes.remove(name) else { return Vec::new() };
        if let Some(names) = self.by_handle.get_mut(&volume.handle) {
            names.remove(name);
            if names.is_empty() {
                self.by_handle.remove(&volume.handle);
            }
        }
        self.of_handle(&volume.handle)
    }

    /// Takes what was told of a volume.
    pub(super) fn put_split(&mut self, name: String, split: Split) -> Vec<String> {
        let concerned = self.of_handle(&name);
        self.splits.insert(name, split);
        concerned
    }

    /// A volume is gone.
    pub(super) fn remove_split(&mut self, name: &str) -> Vec<String> {
        self.splits.remove(name);
        self.of_handle(name)
    }

    /// Names under which a handle is looked at.
    fn of_handle(&self, handle: &str) -> Vec<String> {
        let others = self.by_handle.get(handle).into_iter().flatten();
        std::iter::once(handle.to_owned()).chain(others.cloned()).collect()
    }

    /// Claims that are known, by the name of their volume.
    pub(super) fn claim_names(&self) -> impl Iterator<Item = &String> {
        self.claims.keys()
    }

    /// Classes that are known.
    pub(super) fn class_names(&self) -> impl Iterator<Item = &String> {
        self.classes.keys()
    }

    /// PersistentVolumes that are known.
    pub(super) fn volume_names(&self) -> impl Iterator<Item = &String> {
        self.volumes.keys()
    }

    /// Volumes that are known.
    pub(super) fn split_names(&self) -> impl Iterator<Item = &String> {
        self.splits.keys()
    }
}
