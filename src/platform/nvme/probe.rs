//! What this kernel has of NVMe over TCP, and loading what it has as modules.

use std::collections::BTreeMap;
use std::io::{BufRead, BufReader};
use std::time::Duration;

use super::{Nvme, attribute};
use crate::platform::mount::MountAttr;
use crate::platform::{HostError, Result, failed};

/// Loading a module takes milliseconds, and seconds on a machine that just booted.
const LOAD_BOUND: Duration = Duration::from_secs(30);

/// How a kernel has a module.
#[derive(Clone, Copy, Debug, PartialEq, Eq)]
pub enum Module {
    /// In the kernel itself.
    BuiltIn,
    /// Loaded.
    Loaded,
    /// There for loading.
    Loadable,
    /// Not there.
    Missing,
    /// Not loaded, and the list of modules is not seen from here.
    Unknown,
}

impl Nvme {
    /// How this kernel has each of the modules.
    ///
    /// # Errors
    /// The lists of modules cannot be read.
    pub fn modules<'a>(&self, wanted: &[&'a str]) -> Result<BTreeMap<&'a str, Module>> {
        self.host.enter("read modules", &self.files.modules)?;
        let read = |name: &str| {
            let path = self.files.modules.join(name);
            match std::fs::read_to_string(&path) {
                Err(error) if error.kind() == std::io::ErrorKind::NotFound => Ok(None),
                text => text.map(Some).map_err(failed("read", &path)),
            }
        };
        let (builtin, loadable) = (read("modules.builtin")?, read("modules.dep")?);
        let state = |name: &str| {
            // Built-in modules with parameters have a directory too, but no state.
            let loaded =
                self.files.sys.join("module").join(name.replace('-', "_")).join("initstate").exists();
            match (&builtin, &loadable) {
                _ if loaded => Module::Loaded,
                (Some(list), _) if lists(list, name) => Module::BuiltIn,
                (_, Some(list)) if lists(list, name) => Module::Loadable,
                (None, None) => Module::Unknown,
                (_, _) => Module::Missing,
            }
        };
        Ok(wanted.iter().map(|name| (*name, state(name))).collect())
    }

    /// Loads modules (modprobe(8), whose place and configuration differ between distributions: the kernel calls the same
    /// program when it loads one by itself).
    ///
    /// # Errors
    /// There is no modprobe, or it failed.
    pub fn load(&self, modules: &[&str]) -> Result<()> {
        let args: Vec<_> = ["-a", "-b", "--"].iter().chain(modules).map(|a| (*a).into()).collect();
        self.host.run("modprobe", &args, LOAD_BOUND).map(|_| ())
    }

    /// Makes configfs visible where it is expected; nothing where it is.
    ///
    /// # Errors
    /// The errno of mount(2): ENODEV where the kernel has no configfs.
    pub fn ensure_configfs(&self) -> Result<()> {
        let at = &self.files.configfs;
        if self.host.mounts()?.at(at).is_some_and(|m| m.fs_type == "configfs") {
            return Ok(());
        }
        let attr = MountAttr { nosuid: true, nodev: true, noexec: true, ..MountAttr::default() };
        self.host.mount_filesystem("configfs".as_ref(), at, "configfs", attr, "")
    }

    /// The initiator can prove who it is: sysfs and the list of options do not tell, the kernel's symbols do.
    ///
    /// # Errors
    /// The table of symbols cannot be read.
    pub fn initiator_authenticates(&self) -> Result<bool> {
        let path = self.files.proc.join("kallsyms");
        self.host.enter("read", &path)?;
        let file = match std::fs::File::open(&path) {
            Err(error) if error.kind() == std::io::ErrorKind::NotFound => return Ok(false),
            file => file.map_err(failed("open", &path))?,
        };
        for line in BufReader::new(file).lines() {
            let line = line.map_err(failed("read", &path))?;
            if line.split_ascii_whitespace().nth(2) == Some("nvme_auth_negotiate") {
                return Ok(true);
            }
        }
        Ok(false)
    }

    /// The target can ask hosts for keys: tried with a host of this name, which is removed again. The caller has the lock.
    ///
    /// # Errors
    /// The tree cannot be changed.
    pub fn target_authenticates(&self, trial: &str) -> Result<bool> {
        use super::target::Step;
        let at = std::path::Path::new("hosts").join(trial);
        self.take(&Step::Make(at.clone()))?;
        let key = self.files.configfs.join("nvmet").join(&at).join("dhchap_key");
        let found = match attribute(&key) {
            Ok(_) => key.exists(),
            Err(HostError::Unexpected { .. }) => true,
            Err(error) => return Err(error),
        };
        self.take(&Step::Remove(at))?;
        Ok(found)
    }

    /// The initiator can encrypt its connections (CONFIG_NVME_TCP_TLS): its list of options tells.
    ///
    /// # Errors
    /// The list cannot be read.
    pub fn initiator_encrypts(&self) -> Result<bool> {
        let known = self.connect_options()?.unwrap_or_default();
        Ok(["tls", "tls_key"].iter().all(|option| known.contains(*option)))
    }

    /// The target can take encrypted connections (CONFIG_NVME_TARGET_TCP_TLS): tried with a listener of this number that nothing
    /// is linked to, and that is removed again. The caller has the lock.
    ///
    /// # Errors
    /// The tree cannot be changed.
    pub fn target_encrypts(&self, trial: u16) -> Result<bool> {
        use super::target::Step;
        let at = std::path::Path::new("ports").join(trial.to_string());
        self.take(&Step::Make(at.clone()))?;
        let tried = self
            .take(&Step::Write(at.join("addr_trtype"), "tcp".to_owned()))
            .and_then(|()| self.take(&Step::Write(at.join("addr_tsas"), "tls1.3".to_owned())));
        self.take(&Step::Remove(at))?;
        match tried {
            Ok(()) => Ok(true),
            Err(error) if error.is_missing() || error.errno() == Some(libc::EINVAL) => Ok(false),
            Err(error) => Err(error),
        }
    }
}

/// A list of module files, one in a line before a colon or the line's end, holds the module (`-` and `_` are one).
fn lists(list: &str, name: &str) -> bool {
    let plain = |s: &str| s.replace('-', "_");
    let name = plain(name);
    list.lines().any(|line| {
        let path = line.split(':').next().unwrap_or_default().trim();
        let file = path.rsplit('/').next().unwrap_or_default();
        file.split_once(".ko").is_some_and(|(stem, _)| plain(stem) == name)
    })
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::Host;
    use crate::platform::nvme::KernelFiles;

    #[test]
    fn a_module_is_built_in_loaded_loadable_missing_or_unknown() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let nvme = Nvme::at(&Host::new(), KernelFiles::below(root));
        assert_eq!(nvme.modules(&["nvmet"]).unwrap()["nvmet"], Module::Unknown);
        std::fs::create_dir_all(root.join("modules")).unwrap();
        std::fs::write(root.join("modules/modules.builtin"), "kernel/drivers/nvme/host/nvme-tcp.ko\n")
            .unwrap();
        let dep = "kernel/drivers/nvme/target/nvmet-tcp.ko.xz: kernel/drivers/nvme/target/nvmet.ko.xz\n\
                   kernel/drivers/nvme/target/nvmet.ko.xz:\n";
        std::fs::write(root.join("modules/modules.dep"), dep).unwrap();
        std::fs::create_dir_all(root.join("sys/module/nvmet")).unwrap();
        std::fs::create_dir_all(root.join("sys/module/nvme_tcp")).unwrap();
        let seen = nvme.modules(&["nvme-tcp", "nvmet", "nvmet_tcp", "nvme-fabrics"]).unwrap();
        assert_eq!(seen["nvme-tcp"], Module::BuiltIn, "a directory in sysfs does not mean loaded");
        assert_eq!(seen["nvmet"], Module::Loadable);
        assert_eq!(seen["nvmet_tcp"], Module::Loadable);
        assert_eq!(seen["nvme-fabrics"], Module::Missing);
        std::fs::write(root.join("sys/module/nvmet/initstate"), "live\n").unwrap();
        assert_eq!(nvme.modules(&["nvmet"]).unwrap()["nvmet"], Module::Loaded);
    }

    #[test]
    fn the_kernels_symbols_tell_whether_an_initiator_has_keys() {
        let dir = tempfile::tempdir().unwrap();
        let nvme = Nvme::at(&Host::new(), KernelFiles::below(dir.path()));
        assert!(!nvme.initiator_authenticates().unwrap());
        std::fs::create_dir_all(dir.path().join("proc")).unwrap();
        let table = "0000 t nvme_auth_negotiate_not\n0000 T nvme_auth_negotiate\t[nvme_core]\n";
        std::fs::write(dir.path().join("proc/kallsyms"), table).unwrap();
        assert!(nvme.initiator_authenticates().unwrap());
    }
}
