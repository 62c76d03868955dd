"""Kernels for Hopper GPUs (sm_90a), in Gluon."""
