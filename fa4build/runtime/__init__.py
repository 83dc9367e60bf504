"""What users install: `fa4_kernels` lies below and imports nothing of fa4build."""
