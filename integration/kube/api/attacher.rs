//! VolumeAttachments on a real API server.
