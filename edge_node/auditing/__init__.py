"""Checks a site can run against its own privacy code, and what they do not prove.

    PrivateSteps → mechanism (A1 noise, A2 sensitivity, A3 sampling) ─┐
                 → one_run   (A4 lower bound on epsilon) ─────────────┼→ statement.Statement
    model folder → inversion (what an update gives away) ─────────────┘

Everything runs the code that trains (`training.private_step`, `training.noise`),
on made-up gradients and texts: no record of the site is read.
"""
