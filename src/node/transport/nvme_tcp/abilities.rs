//! What this node's kernel can carry, and making it ready.

use std::collections::BTreeMap;

use super::{kernel, names, plan};
use crate::node::transport::{Abilities, Ability, TransportError};
use crate::platform::Host;
use crate::platform::keyring::NvmeKeyring;
use crate::platform::nvme::Nvme;
use crate::platform::nvme::probe::Module;
use crate::platform::tls::{Handshakes, trial};

/// What the owner's end consists of; the kernel loads the last one by itself when it begins to listen.
const OWNER: [&str; 3] = ["configfs", "nvmet", "nvmet-tcp"];
/// What the consumer's end consists of; the kernel loads the last one by itself when it connects.
const CONSUMER: [&str; 2] = ["nvme-fabrics", "nvme-tcp"];

/// What the kernel's TLS consists of, with ciphers that are modules in most kernels. It loads them by itself where it finds modprobe.
const TLS: [&str; 3] = ["tls", "gcm", "ghash-generic"];

/// What this node can carry. Loads modules that are there and not loaded yet, as the first export or attachment would.
#[must_use]
pub fn probe(host: &Host, nvme: &Nvme) -> Abilities {
    let owner = judge(nvme, &OWNER, prepare_owner(nvme));
    let consumer = judge(nvme, &CONSUMER, prepare_consumer(nvme));
    let authentication = match (&owner, &consumer) {
        (Ability::Able { .. }, Ability::Able { .. }) => authentication(nvme),
        _ => Ability::Unable { reason: "this node cannot be both owner and consumer".to_owned() },
    };
    let encryption = match &authentication {
        Ability::Able { .. } => encryption(host, nvme),
        Ability::Unable { reason } => {
            Ability::Unable { reason: format!("it goes with authentication, and {reason}") }
        }
    };
    Abilities { owner, consumer, authentication, encryption }
}

/// What is seen of both ends without loading anything. While it stays the same, so does what [`probe`] tells.
#[derive(Clone, Debug, PartialEq, Eq)]
pub struct Signs {
    target: bool,
    initiator: bool,
    modules: BTreeMap<&'static str, Module>,
}

/// Looks at both ends as they are.
///
/// # Errors
/// The kernel's files cannot be read.
pub fn signs(nvme: &Nvme) -> Result<Signs, TransportError> {
    let all = [OWNER.as_slice(), &CONSUMER, &TLS].concat();
    Ok(Signs {
        target: nvme.target().map_err(kernel("read the NVMe target's tree"))?.is_some(),
        initiator: nvme.connect_options().map_err(kernel("read /dev/nvme-fabrics"))?.is_some(),
        modules: nvme.modules(&all).map_err(kernel("read the lists of modules"))?,
    })
}

/// Makes the owner's end ready: configfs mounted, the target loaded.
///
/// # Errors
/// [`TransportError::Unable`] with what is missing.
pub fn prepare_owner(nvme: &Nvme) -> Result<(), TransportError> {
    const ACTION: &str = "export branches over NVMe/TCP";
    let ready = || nvme.target().map(|t| t.is_some()).map_err(kernel("read the NVMe target's tree"));
    if ready()? {
        return Ok(());
    }
    let loaded = nvme.load(&OWNER);
    let mounted = nvme.ensure_configfs();
    if ready()? {
        return Ok(());
    }
    let complaint = loaded.err().or(mounted.err()).map(|e| e.to_string());
    Err(TransportError::Unable { action: ACTION, reason: missing(nvme, &OWNER, complaint) })
}

/// Makes the consumer's end ready.
///
/// # Errors
/// [`TransportError::Unable`] with what is missing.
pub fn prepare_consumer(nvme: &Nvme) -> Result<(), TransportError> {
    const ACTION: &str = "attach branches over NVMe/TCP";
    let ready = || nvme.connect_options().map(|o| o.is_some()).map_err(kernel("read /dev/nvme-fabrics"));
    if ready()? {
        return Ok(());
    }
    let loaded = nvme.load(&CONSUMER);
    if ready()? {
        return Ok(());
    }
    let complaint = loaded.err().map(|e| e.to_string());
    Err(TransportError::Unable { action: ACTION, reason: missing(nvme, &CONSUMER, complaint) })
}

fn judge(nvme: &Nvme, wanted: &[&str], ready: Result<(), TransportError>) -> Ability {
    if let Err(error) = ready {
        let reason = match error {
            TransportError::Unable { reason, .. } => reason,
            error => error.to_string(),
        };
        return Ability::Unable { reason };
    }
    let Ok(modules) = nvme.modules(wanted) else {
        return Ability::Able { how: "it is there".to_owned() };
    };
    // What the kernel loads by itself must be there to be loaded.
    if wanted.iter().any(|name| modules[name] == Module::Missing) {
        return Ability::Unable { reason: missing(nvme, wanted, None) };
    }
    let word = |module: &Module| match module {
        Module::BuiltIn => "built in",
        Module::Loaded => "loaded",
        Module::Loadable => "loaded on demand",
        Module::Missing | Module::Unknown => "not seen from here",
    };
    let how =
        wanted.iter().map(|name| format!("{name} {}", word(&modules[name]))).collect::<Vec<_>>().join(", ");
    Ability::Able { how }
}

/// Why it does not work, and what would help.
fn missing(nvme: &Nvme, wanted: &[&str], complaint: Option<String>) -> String {
    let modules = nvme.modules(wanted).unwrap_or_default();
    let of = |state: Module| {
        wanted.iter().copied().filter(|name| modules.get(name) == Some(&state)).collect::<Vec<_>>().join(" ")
    };
    let (lacking, there, unknown) = (of(Module::Missing), of(Module::Loadable), of(Module::Unknown));
    let tail = complaint.map(|c| format!(" ({c})")).unwrap_or_default();
    if !lacking.is_empty() {
        format!(
            "this kernel has no module {lacking}: install the package that has it (Ubuntu: linux-modules-extra of this \
             kernel, RHEL: kernel-modules-core), or use a kernel that has it{tail}"
        )
    } else if !there.is_empty() {
        format!("{there} is not loaded and could not be: run modprobe -a {there}{tail}")
    } else if !unknown.is_empty() {
        format!(
            "{unknown} is not loaded, and the kernel's modules are not seen from here: run modprobe -a {unknown} on the \
             node, or give the agent its /lib/modules{tail}"
        )
    } else {
        format!(
            "the modules are there, but configfs or /dev/nvme-fabrics is not seen from here: mount it{tail}"
        )
    }
}

fn authentication(nvme: &Nvme) -> Ability {
    let tried = || -> Result<(bool, bool), TransportError> {
        let _lock = nvme.lock_target().map_err(kernel("lock the NVMe target's tree"))?;
        let target = nvme.target_authenticates(&names::trial_host()).map_err(kernel("try a key"))?;
        let initiator = nvme.initiator_authenticates().map_err(kernel("look for the initiator's keys"))?;
        Ok((target, initiator))
    };
    let lacks = |end: &str, option: &str| Ability::Unable {
        reason: format!(
            "this kernel's NVMe {end} was built without {option}: use one that has it (Debian: 6.12)"
        ),
    };
    match tried() {
        Ok((true, true)) => Ability::Able { how: "DH-HMAC-CHAP".to_owned() },
        Ok((false, _)) => lacks("target", "CONFIG_NVME_TARGET_AUTH"),
        Ok((true, false)) => lacks("initiator", "CONFIG_NVME_HOST_AUTH"),
        Err(error) => Ability::Unable { reason: error.to_string() },
    }
}

fn encryption(host: &Host, nvme: &Nvme) -> Ability {
    let unable = |reason: String| Ability::Unable { reason };
    let tried = || -> Result<(bool, bool), TransportError> {
        let _lock = nvme.lock_target().map_err(kernel("lock the NVMe target's tree"))?;
        let target = nvme.target_encrypts(plan::TRIAL_PORT).map_err(kernel("try a listener with TLS"))?;
        let initiator = nvme.initiator_encrypts().map_err(kernel("read /dev/nvme-fabrics"))?;
        Ok((target, initiator))
    };
    let lacks = |end: &str, option: &str| {
        unable(format!(
            "this kernel's NVMe {end} was built without {option}: use one that has it (Debian: 6.12)"
        ))
    };
    match tried() {
        Ok((true, true)) => {}
        Ok((false, _)) => return lacks("target", "CONFIG_NVME_TARGET_TCP_TLS"),
        Ok((true, false)) => return lacks("initiator", "CONFIG_NVME_TCP_TLS"),
        Err(error) => return unable(error.to_string()),
    }
    // Whether they are there is tried next.
    if let Err(error) = nvme.load(&TLS) {
        tracing::debug!(%error, "modules for TLS are not loaded");
    }
    match NvmeKeyring::find(host) {
        Ok(Some(_)) => {}
        Ok(None) => return unable("the kernel's keyring .nvme is not seen from here".to_owned()),
        Err(error) => return unable(error.to_string()),
    }
    match Handshakes::known(host) {
        Ok(true) => {}
        Ok(false) => return unable("this kernel was built without CONFIG_NET_HANDSHAKE".to_owned()),
        Err(error) => return unable(error.to_string()),
    }
    match trial(host) {
        Ok(()) => Ability::Able { how: "TLS 1.3".to_owned() },
        Err(error) => unable(format!("{error}: see that the modules {} can be loaded", TLS.join(" "))),
    }
}

#[cfg(test)]
mod tests {
    use super::*;
    use crate::platform::nvme::KernelFiles;

    fn reason(ability: &Ability) -> &str {
        match ability {
            Ability::Unable { reason } => reason,
            Ability::Able { how } => panic!("able: {how}"),
        }
    }

    #[test]
    fn what_is_missing_is_named_with_what_helps() {
        let dir = tempfile::tempdir().unwrap();
        let nvme = Nvme::at(&Host::new(), KernelFiles::below(dir.path()));
        let text = missing(&nvme, &OWNER, Some("why".into()));
        assert!(text.contains("not seen from here") && text.contains("(why)"), "{text}");
        std::fs::create_dir_all(dir.path().join("modules")).unwrap();
        std::fs::write(dir.path().join("modules/modules.builtin"), "kernel/fs/configfs/configfs.ko\n")
            .unwrap();
        std::fs::write(dir.path().join("modules/modules.dep"), "kernel/drivers/nvme/target/nvmet.ko:\n")
            .unwrap();
        let text = missing(&nvme, &OWNER, None);
        assert!(text.contains("no module nvmet-tcp:") && text.contains("linux-modules-extra"), "{text}");
        let text = missing(&nvme, &OWNER[..2], None);
        assert!(text.contains("modprobe -a nvmet"), "{text}");
    }

    #[test]
    fn a_kernel_that_loads_the_rest_itself_is_able() {
        let dir = tempfile::tempdir().unwrap();
        let root = dir.path();
        let nvme = Nvme::at(&Host::new(), KernelFiles::below(root));
        std::fs::create_dir_all(root.join("modules")).unwrap();
        std::fs::write(root.join("modules/modules.builtin"), "a/nvme-fabrics.ko\n").unwrap();
        std::fs::write(root.join("modules/modules.dep"), "a/nvme-tcp.ko.zst:\n").unwrap();
        let able = judge(&nvme, &CONSUMER, Ok(()));
        assert_eq!(able, Ability::Able { how: "nvme-fabrics built in, nvme-tcp loaded on demand".into() });
        std::fs::write(root.join("modules/modules.dep"), "").unwrap();
        assert!(
            reason(&judge(&nvme, &CONSUMER, Ok(()))).contains("nvme-tcp"),
            "the kernel could not load it either"
        );
    }
}
