"""What a GPU has for codecs (for device_codec.pyx alone)."""
