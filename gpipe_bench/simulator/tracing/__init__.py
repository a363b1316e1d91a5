"""What a model does: its layers traced on the meta device, each operation as kernels and storages."""
