//! Whether this kernel has an NFS server and an NFS client, looked up without loading either.

use super::NfsRoots;
use crate::platform::{Host, Result};

/// The longest of the files that are read here; a list of modules has half a megabyte.
const LIMIT: usize = 16 << 20;

/// One part of the kernel.
#[derive(Clone, Debug, PartialEq, Eq)]
pub enum Facility {
    /// It is in the kernel now: built in, or loaded.
    Present,
    /// It is a module that the kernel loads when it is asked for.
    Loadable,
    /// It is neither; why, and what helps.
    Missing(String),
}

/// Both ends of NFS.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct NfsFacilities {
    /// The server, `nfsd`.
    pub server: Facility,
    /// The client of version 4, `nfsv4`.
    pub client: Facility,
}

impl Host {
    /// What this kernel has.
    ///
    /// # Errors
    /// The kernel's own lists cannot be read.
    pub fn nfs_facilities(&self, roots: &NfsRoots) -> Result<NfsFacilities> {
        let text = |bytes: Option<Vec<u8>>| String::from_utf8_lossy(&bytes.unwrap_or_default()).into_owned();
        let known = text(self.read_file(&roots.filesystems, LIMIT)?);
        let (release, _) = self.kernel()?;
        let directory = roots.modules.join(&release);
        let built_in = text(self.read_file(&directory.join("modules.builtin"), LIMIT)?);
        let modules = self.read_file(&directory.join("modules.dep"), LIMIT)?.map(|b| text(Some(b)));
        let of = |kind, module| facility(kind, module, &release, &known, &built_in, modules.as_deref());
        Ok(NfsFacilities { server: of("nfsd", "nfsd"), client: of("nfs4", "nfsv4") })
    }
}

fn facility(
    kind: &str,
    module: &str,
    release: &str,
    known: &str,
    built_in: &str,
    modules: Option<&str>,
) -> Facility {
    if known.lines().any(|line| line.split_whitespace().last() == Some(kind)) {
        return Facility::Present;
    }
    let file = format!("/{module}.ko");
    let named = |list: &str| {
        list.lines().filter_map(|line| line.split(':').next()).any(|path| {
            path.rfind(&file).is_some_and(|at| {
                // Modules may be compressed: `.ko.xz`, `.ko.zst`, `.ko.gz`.
                matches!(path.as_bytes().get(at + file.len()), None | Some(b'.'))
            })
        })
    };
    if named(built_in) {
        return Facility::Present;
    }
    match modules {
        Some(list) if named(list) => Facility::Loadable,
        Some(_) => Facility::Missing(format!(
            "kernel {release} has no module {module}; install the distribution's package of further modules for this \
             kernel (linux-modules-extra, kernel-modules), or on Talos the system extension that has it"
        )),
        None => Facility::Missing(format!(
            "kernel {release} has no {module} built in, and there are no modules for it on this machine"
        )),
    }
}

#[cfg(test)]
mod tests {
    use super::*;

    fn of(known: &str, built_in: &str, modules: Option<&str>) -> Facility {
        facility("nfsd", "nfsd", "6.12", known, built_in, modules)
    }

    #[test]
    fn what_the_kernel_knows_now_or_has_built_in_is_present() {
        assert_eq!(of("nodev\tsysfs\nnodev\tnfsd\n", "", None), Facility::Present);
        assert_eq!(of("\text4\n", "kernel/fs/nfsd/nfsd.ko\n", Some("")), Facility::Present);
    }

    #[test]
    fn a_module_is_loadable_compressed_or_not() {
        for name in ["nfsd.ko", "nfsd.ko.xz", "nfsd.ko.zst"] {
            let list = format!("kernel/fs/nfsd/{name}: kernel/fs/lockd/lockd.ko\n");
            assert_eq!(of("", "", Some(&list)), Facility::Loadable, "{name}");
        }
    }

    #[test]
    fn a_module_that_only_needs_it_or_is_named_alike_is_not_it() {
        let list = "kernel/fs/x.ko: kernel/fs/nfsd/nfsd.ko\nkernel/fs/nfsd.kon: \nkernel/fs/my-nfsd.ko:\n";
        let Facility::Missing(reason) = of("nodev\tnfs\n", "", Some(list)) else { panic!("found") };
        assert!(reason.contains("6.12") && reason.contains("nfsd"), "{reason}");
        assert!(matches!(of("", "", None), Facility::Missing(_)));
    }
}
