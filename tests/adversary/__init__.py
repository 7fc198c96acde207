"""Wrongs that each check must catch, and changes that it must let pass.

A check that says "agrees", "met" or "within" enters the product with its rows here.
"""
