"""What every implementation and every runtime must do beyond the generated cases of a contract.

Used by the contract tests and by `headrace conformance`; each check runs on whatever device its op or runtime has.
"""
