"""Small CuTe-DSL kernels whose host halves exercise the launch-plan extractor. Never run on a device by these tests."""
