"""Run the PTX of Triton kernels on a CPU: the code that a GPU gets, with every address checked."""
