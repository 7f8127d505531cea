"""What couplings do to the gradient, as formulas to test them by."""


def correlation(kind: str, strength: float, siblings: int) -> float:
    """Correlation of a child's noise with that of a sibling, averaged over its siblings.

    1 / (1 + s^2) for shared, -1 / (K - 1) for simplex and antithetic, else 0; 0 for a lone child.
    """
    if siblings == 1:
        return 0.0
    if kind == "shared":
        return 1 / (1 + strength**2)
    return -1 / (siblings - 1) if kind in ("simplex", "antithetic") else 0.0


def gradient_factor(rho: float, siblings: int, compared: int) -> float:
    """1 - (1 + (K - 1) rho) / n: what a baseline that holds the child itself leaves of E[r xi].

    The baseline is the mean reward of n nodes of one depth in a balanced tree, K siblings of mean
    correlation rho among them. Positive rho shrinks the expected gradient and turns it nowhere;
    simplex and antithetic noise leave all of it.
    """
    return 1 - (1 + (siblings - 1) * rho) / compared
