"""Starting a kernel, and what all kernels share: addresses, sums, mathematics, private names of torch and triton."""
