"""The mathematics: pure functions of tensors, without modules, state, files or global randomness.

One convention holds everywhere:

    sigma      share of noise, from 1 (noise) down to 0 (data)
    x          (1 - sigma) * x0 + sigma * noise, a latent of shape (B, *latent)
    v          velocity dx/dsigma = noise - x0
    dt         sigma_next - sigma, negative
    g          size of a step's noise: the diffusion coefficient of an SDE, the level of CPS
    mean, std  of the Gaussian that a step draws from; std is one number a row

Values of a row (sigma, g, std, ...) are 0-d or (B,). Steps are computed in fp32 or wider.
"""
