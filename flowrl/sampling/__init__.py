"""Rollouts: the sampler that grows a tree, its images and scores, and two-stage rollouts."""
