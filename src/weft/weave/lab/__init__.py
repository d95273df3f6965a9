"""Multi-task kernels kept to reproduce a paper's figures; no training uses them."""
