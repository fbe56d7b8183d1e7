"""The laws that are fitted to losses, each as terms of a log-sum-exp (see huber.py), and where a fit starts.

θ holds the logarithms of coefficients and the exponents themselves, in the order of `parameters`.
"""

from __future__ import annotations

import itertools
from collections.abc import Mapping
from dataclasses import dataclass

import numpy as np

from ..spec.errors import SpecError, did_you_mean
from .huber import Array, Terms, huber
from .points import Points

EXPONENTS = (0.05, 0.1, 0.2, 0.3, 0.45, 0.65, 1.0)  # of the grid that starts are taken from
STARTS = 12  # the best of that grid


@dataclass(frozen=True)
class Term:
    """coefficient × variable^−exponent; a constant has no variable."""

    coefficient: str
    exponent: str = ""
    variable: str = ""


@dataclass(frozen=True)
class Law:
    name: str
    formula: str
    source: str
    terms: tuple[Term, ...]
    parameters: tuple[str, ...]

    @property
    def variables(self) -> tuple[str, ...]:
        return tuple(term.variable for term in self.terms if term.variable)

    @property
    def coefficients(self) -> tuple[str, ...]:
        return tuple(term.coefficient for term in self.terms)

    def of(self, variables: Mapping[str, Array]) -> Terms:
        design = np.zeros((len(next(iter(variables.values()))), len(self.terms), len(self.parameters)))
        for index, term in enumerate(self.terms):
            design[:, index, self.parameters.index(term.coefficient)] = 1
            if term.variable:
                design[:, index, self.parameters.index(term.exponent)] = -np.log(variables[term.variable])
        return Terms(design)

    def log_loss(self, theta: Array, variables: Mapping[str, Array]) -> Array:
        """Of θ (…, parameters) at variables that broadcast with `…`."""
        column = {name: theta[..., index] for index, name in enumerate(self.parameters)}
        logs = [column[term.coefficient] for term in self.terms]
        for index, term in enumerate(self.terms):
            if term.variable:
                logs[index] = logs[index] - column[term.exponent] * np.log(variables[term.variable])
        result: Array = np.logaddexp.reduce(np.broadcast_arrays(*logs), axis=0)
        return result

    def natural(self, theta: Array) -> dict[str, Array]:
        """Parameters as the formula writes them, of θ (…, parameters)."""
        with np.errstate(over="ignore"):
            return {
                name: np.exp(theta[..., index]) if name in self.coefficients else theta[..., index]
                for index, name in enumerate(self.parameters)
            }

    def theta(self, natural: Mapping[str, float]) -> Array:
        values = [np.log(natural[name]) if name in self.coefficients else natural[name] for name in self.parameters]
        return np.array(values)

    def starts(self, variables: Mapping[str, Array], loss: Array) -> Array:
        """Variable projection: for exponents of a grid the coefficients are a linear least-squares problem."""
        free = [name for name in self.parameters if name not in self.coefficients]
        grid = np.array(list(itertools.product(EXPONENTS, repeat=len(free))))
        found = []
        middle = {name: np.exp(np.log(values).mean()) for name, values in variables.items()}
        for exponents in grid:
            of = dict(zip(free, exponents, strict=True))
            columns = [
                (variables[term.variable] / middle[term.variable]) ** -of[term.exponent]
                if term.variable
                else np.ones_like(loss)
                for term in self.terms
            ]
            basis = np.stack(columns, axis=1) / loss[:, None]  # relative errors
            solved = np.linalg.lstsq(basis, np.ones_like(loss), rcond=1e-10)[0]
            solved = np.maximum(solved, 0.01 * loss.mean())
            values = dict(of)
            for term, value in zip(self.terms, solved, strict=True):
                shift = of[term.exponent] * np.log(middle[term.variable]) if term.variable else 0.0
                values[term.coefficient] = np.log(value) + shift
            found.append([values[name] for name in self.parameters])
        starts = np.array(found)
        return best_starts(self.of(variables), starts, loss)


@dataclass(frozen=True)
class Kaplan(Law):
    """L = [(Nc/N)^(αN/αD) + Dc/D]^αD as log L = αD · logsumexp(u − r log N, v − log D); N without embeddings."""

    def of(self, variables: Mapping[str, Array]) -> Terms:
        n, d = np.log(variables["n"]), np.log(variables["d"])
        zero, one = np.zeros_like(n), np.ones_like(n)
        # θ = (αD, u, r, v); v − log D: the term of D has no free exponent, so its constant part is a row of its own
        design = np.stack([np.stack([zero, one, -n, zero], 1), np.stack([zero, zero, zero, one], 1)], 1)
        return Terms(design, power=0, offset=np.stack([zero, -d], 1))

    def log_loss(self, theta: Array, variables: Mapping[str, Array]) -> Array:
        power, u, r, v = np.moveaxis(theta, -1, 0)
        result: Array = power * np.logaddexp(u - r * np.log(variables["n"]), v - np.log(variables["d"]))
        return result

    def natural(self, theta: Array) -> dict[str, Array]:
        power, u, r, v = np.moveaxis(theta, -1, 0)
        with np.errstate(over="ignore"):
            return {"Nc": np.exp(u / r), "Dc": np.exp(v), "alpha_N": r * power, "alpha_D": power}

    def theta(self, natural: Mapping[str, float]) -> Array:
        r = natural["alpha_N"] / natural["alpha_D"]
        return np.array([natural["alpha_D"], r * np.log(natural["Nc"]), r, np.log(natural["Dc"])])

    def starts(self, variables: Mapping[str, Array], loss: Array) -> Array:
        n, d, found = variables["n"], variables["d"], []
        for alpha_n, alpha_d in itertools.product(EXPONENTS, EXPONENTS):
            r, lifted = alpha_n / alpha_d, loss ** (1 / alpha_d)
            middle = np.exp(np.log(n).mean())
            basis = np.stack([(n / middle) ** -r, 1 / d], 1) / lifted[:, None]
            scale = basis.mean(0)
            solved = np.linalg.lstsq(basis / scale, np.ones_like(loss), rcond=1e-10)[0]
            first, second = np.log(np.maximum(solved, 0.01)) - np.log(scale)
            found.append([alpha_d, first + r * np.log(middle), r, second])
        return best_starts(self.of(variables), np.array(found), loss)


def best_starts(terms: Terms, starts: Array, loss: Array) -> Array:
    with np.errstate(over="ignore", invalid="ignore"):
        off = huber(terms.log_loss(starts) - np.log(loss), 0.1).sum(1)
    return starts[np.argsort(np.nan_to_num(off, nan=np.inf))[:STARTS]]


N_TERM, D_TERM = Term("A", "alpha", "n"), Term("B", "beta", "d")
LAWS: dict[str, Law] = {
    law.name: law
    for law in (
        Law(
            "chinchilla",
            "L = E + A/N^alpha + B/D^beta",
            "Hoffmann et al. 2022 (arXiv 2203.15556), as refitted by Besiroglu et al. 2024 (arXiv 2404.10102)",
            (Term("E"), N_TERM, D_TERM),
            ("E", "A", "alpha", "B", "beta"),
        ),
        Law(
            "tied",
            "L = E + A/N^alpha + B/D^alpha",
            "Gadre et al. 2024 (arXiv 2403.08540): E + (a·M^eta + b·M^-eta)·C^-eta, M = D/N, eta = alpha/2",
            (Term("E"), N_TERM, Term("B", "alpha", "d")),
            ("E", "A", "B", "alpha"),
        ),
        Kaplan(
            "kaplan",
            "L = ((Nc/N)^(alpha_N/alpha_D) + Dc/D)^alpha_D",
            "Kaplan et al. 2020 (arXiv 2001.08361), equation 1.5; N without embeddings",
            (Term("", "", "n"), Term("", "", "d")),
            ("alpha_D", "u", "r", "v"),
        ),
        Law(
            "compute",
            "L = L_inf + a/C^alpha",
            "Hestness et al. 2017 (arXiv 1712.00409), Henighan et al. 2020 (arXiv 2010.14701)",
            (Term("L_inf"), Term("a", "alpha", "flops")),
            ("L_inf", "a", "alpha"),
        ),
        Law(
            "context",
            "L = E + A/N^alpha + B/D^beta + G/S^gamma",
            "the context length S as a third term, cf. Xiong et al. 2023 (arXiv 2309.16039)",
            (Term("E"), N_TERM, D_TERM, Term("G", "gamma", "seq")),
            ("E", "A", "alpha", "B", "beta", "G", "gamma"),
        ),
    )
}


def law_of(name: str) -> Law:
    if name not in LAWS:
        raise SpecError(f"--law {name} is not known{did_you_mean(name, LAWS)}")
    return LAWS[name]


def variables_of(law: Law, points: Points) -> dict[str, Array]:
    return {name: points.need(name, f"--law {law.name}") for name in law.variables}
