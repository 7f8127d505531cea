"""What a rollout does, as data: where it branches, which steps are stochastic, what is trained."""
