"""Plans and chunks in flight, as the lanes of a device codec read them (for device_codec.pyx alone)."""
