"""The one exception that is meant for people: a sentence that names the thing and what to do."""


class UserError(Exception):
    """Something the user can mend. The command line prints it alone, without a traceback."""
