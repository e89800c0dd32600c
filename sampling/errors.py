"""The one error tree of the service, in the lowest layer so that every layer may raise from it.

    ServiceError                    everything this service raises on purpose
    ├── ConfigError (ValueError)        a configuration, argument or sampling parameter cannot be used
    ├── PromptError (ValueError)        a prompt cannot be used: empty, too long, unknown token id, malformed line
    ├── RecordError (ValueError)        a trajectory record or a file of records breaks its own invariants
    ├── CheckpointError (RuntimeError)  weights or tokenizer files are missing, damaged or of an unknown kind
    ├── WorkerError (RuntimeError)      a worker died, hung or could not be started, and the retries are spent
    └── RunError (RuntimeError)         a run could not be finished or continued

Messages say what was expected, what came, where, and what to try next. `exit_code` is what the command line
returns: 2 when the input has to change before the same command can succeed, 1 when the run itself failed.
Every class survives pickling, since errors travel from workers to the driver.
"""


class ServiceError(Exception):
    """Root of the tree; catching it catches every deliberate error and nothing else."""

    exit_code = 1


class ConfigError(ServiceError, ValueError):
    """A configuration, argument or sampling parameter cannot be used."""

    exit_code = 2


class PromptError(ServiceError, ValueError):
    """A prompt cannot be used."""

    exit_code = 2


class RecordError(ServiceError, ValueError):
    """A trajectory record, or a file of them, breaks its own invariants."""


class CheckpointError(ServiceError, RuntimeError):
    """Weights or tokenizer files are missing, damaged or of an unknown kind."""

    exit_code = 2


class WorkerError(ServiceError, RuntimeError):
    """A worker died, hung or could not be started, and the retries are spent."""


class RunError(ServiceError, RuntimeError):
    """A run could not be finished or continued."""
