"""The signature of an Equinox module is its annotated fields, as with a dataclass."""

import re

import griffe


class EquinoxFields(griffe.Extension):
    """Give every class that derives from `equinox.Module` the ``__init__`` that it has at run time."""

    def on_class_members(self, *, cls, **others):
        """Called by griffe for each class once its members are known."""
        if "__init__" in cls.members or not {str(base) for base in cls.bases} & {"eqx.Module", "Dynamics"}:
            return
        parameters = [griffe.Parameter("self")]
        for name, field in cls.members.items():
            if not field.is_attribute or field.annotation is None:
                continue
            value = None if field.value is None else str(field.value)
            if value and value.startswith("eqx.field("):
                found = re.search(r"\bdefault=([^,)]+)", value)
                value = found and found[1]
            kind = griffe.ParameterKind.positional_or_keyword
            parameters.append(griffe.Parameter(name, kind=kind, annotation=field.annotation, default=value))
        cls.set_member("__init__", griffe.Function("__init__", parameters=griffe.Parameters(*parameters)))
