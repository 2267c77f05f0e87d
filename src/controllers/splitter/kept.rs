//! How a volume's object is kept: there are ten thousand, nearly all of them at rest, and a `VolumeSplit` in memory takes more
//! than twice its JSON.

use std::borrow::Cow;

use crate::store::object::{Version, VolumeSplit};
use crate::store::view::is_ready;

/// A volume's object.
#[derive(Debug)]
pub(super) enum Kept {
    /// As it is: something is going on with it.
    Whole(Box<VolumeSplit>),
    /// As JSON: at rest, it is looked at when its object or one of its branches changes, and else not.
    Packed {
        /// Asked for with each event.
        version: Version,
        /// The whole object.
        text: Box<str>,
    },
}

impl Kept {
    pub(super) fn new(split: VolumeSplit) -> Self {
        let at_rest = split.meta.deleting.is_none() && is_ready(&split);
        match serde_json::to_string(&split) {
            Ok(text) if at_rest => Self::Packed { version: split.meta.version, text: text.into() },
            _ => Self::Whole(Box::new(split)),
        }
    }

    pub(super) const fn version(&self) -> &Version {
        match self {
            Self::Whole(split) => &split.meta.version,
            Self::Packed { version, .. } => version,
        }
    }

    /// The object. What was written here is read, so there always is one.
    pub(super) fn split(&self) -> Option<Cow<'_, VolumeSplit>> {
        match self {
            Self::Whole(split) => Some(Cow::Borrowed(split)),
            Self::Packed { text, .. } => serde_json::from_str(text).ok().map(Cow::Owned),
        }
    }
}

#[cfg(test)]
mod tests {
    use super::super::tests::split;
    use super::*;
    use crate::store::object::{Attachment, set_condition};

    #[test]
    fn a_volume_at_rest_is_packed_and_comes_back_as_it_was() {
        let mut split = split("v", 7);
        split.meta.version = Version("41".to_owned());
        split.meta.uid = "u".to_owned();
        split.meta.labels.insert("union.io/claim".to_owned(), "c".to_owned());
        let attachment = Attachment {
            node: "n".parse().unwrap(),
            access_mode: split.spec.access_modes[0],
            read_only: true,
            volume_attachment: Some("csi-1".to_owned()),
        };
        split.spec.attached.push(attachment);
        assert!(matches!(Kept::new(split.clone()), Kept::Whole(_)), "it is being made");
        set_condition(&mut split.status.conditions, jiff::Timestamp::now(), "Ready", true, "Bound", "m");
        let kept = Kept::new(split.clone());
        assert!(matches!(kept, Kept::Packed { .. }));
        assert_eq!(kept.version(), &split.meta.version);
        assert_eq!(*kept.split().unwrap(), split);
        split.meta.deleting = Some(jiff::Timestamp::UNIX_EPOCH);
        assert!(matches!(Kept::new(split), Kept::Whole(_)), "it goes");
    }
}
