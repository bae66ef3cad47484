"""Every error and warning that fp4compile raises on purpose.

Each message names the tensor, shape, site or option at fault and the way out. They also derive from the
built-in class that fits, so `except ValueError` works for callers who do not know this package.
"""


class Fp4Error(Exception):
    """Base class: `except Fp4Error` catches whatever this package raises on purpose."""


class ConfigError(Fp4Error, ValueError):
    """A recipe, policy, option or argument that cannot be honoured as given."""


class UnsupportedDtypeError(Fp4Error, TypeError):
    """A tensor whose dtype has no 4-bit path; the message names the cast that has one."""


class RewriteError(Fp4Error, RuntimeError):
    """A captured graph that cannot be rewritten as the plan says."""


class Fp4Warning(UserWarning):
    """Something legal that is probably not what was meant, such as a policy that matched nothing."""
