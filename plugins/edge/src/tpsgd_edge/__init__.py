"""Learning on a device: adaptors on a frozen encoder, and streams of samples."""
