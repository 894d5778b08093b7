"""Minimax coefficients of the polynomials in csrc/sinusoid.h (run: python docs/sinusoid_fit.py; needs mpmath).

On |x| <= pi/4, with z = x*x:
    sin x = x + x*z*S(z)            cos x = 1 + z*(-1/2 + z*C(z))
A Remez exchange in 60 digits minimises the absolute error; coefficients are then rounded to the type that evaluates
them, one after the other from the lowest degree, with the rest fitted again, so that the rounding of one is taken up
by the next. Only absolute error matters: a sinusoid is added to an embedding of order one.
"""

import numpy as np
from mpmath import cos, linspace, lu_solve, matrix, mp, mpf, pi, sin

mp.dps = 60
LIMIT = pi / 4


def remez(target, weight, degree):
    """Coefficients of the polynomial P in z that minimises |weight(x) * P(x*x) - target(x)| on (0, pi/4]."""
    count = degree + 1
    nodes = [LIMIT * (1 - cos(pi * (2 * i + 1) / (2 * (count + 1)))) / 2 for i in range(count + 1)]
    grid = linspace(LIMIT / 2000, LIMIT, 2000)
    for _ in range(12):
        rows = [[weight(x) * x ** (2 * j) for j in range(count)] + [(-1) ** i] for i, x in enumerate(nodes)]
        solution = lu_solve(matrix(rows), matrix([target(x) for x in nodes]))
        coefficients = list(solution[:count])
        errors = [weight(x) * sum(c * x ** (2 * j) for j, c in enumerate(coefficients)) - target(x) for x in grid]
        extrema, last = [], 0
        for i in range(len(grid)):  # one extremum between two changes of sign
            if i and (errors[i] > 0) != (errors[i - 1] > 0):
                extrema.append(max(range(last, i), key=lambda k: abs(errors[k])))
                last = i
        extrema.append(max(range(last, len(grid)), key=lambda k: abs(errors[k])))
        if len(extrema) < count + 1:
            break
        extrema = sorted(sorted(extrema, key=lambda k: -abs(errors[k]))[: count + 1])
        nodes = [grid[k] for k in extrema]
    return coefficients, max(abs(e) for e in errors)


def rounded_fit(target, weight, degree, kind):
    """remez, with the coefficients rounded to `kind` one by one and the remaining ones fitted again."""
    done = []
    while len(done) <= degree:
        rest = lambda x: target(x) - weight(x) * sum(c * x ** (2 * j) for j, c in enumerate(done))  # noqa: E731
        shifted = lambda x: weight(x) * x ** (2 * len(done))  # noqa: E731
        coefficients, error = remez(rest, shifted, degree - len(done))
        done.append(mpf(float(kind(float(coefficients[0])))))
    return done, error


if __name__ == "__main__":
    for kind, sin_degree, cos_degree in ((np.float32, 2, 2), (np.float64, 5, 5)):
        s, s_error = rounded_fit(lambda x: sin(x) - x, lambda x: x**3, sin_degree, kind)
        c, c_error = rounded_fit(lambda x: cos(x) - 1 + x * x / 2, lambda x: x**4, cos_degree, kind)
        digits = 9 if kind is np.float32 else 17
        print(kind.__name__, "sin", [f"{float(v):.{digits}g}" for v in s], f"error {float(s_error):.2e}")
        print(kind.__name__, "cos", [f"{float(v):.{digits}g}" for v in c], f"error {float(c_error):.2e}")
