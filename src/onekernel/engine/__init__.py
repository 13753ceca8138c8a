"""One thread that owns the device; requests, cancellation, backends."""
