//! Which pools may hold branches of a volume.
