"""ckptpipe: checkpoint images to NVMe, FUSE and S3, and back."""
