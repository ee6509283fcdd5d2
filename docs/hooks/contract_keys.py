"""The tables of keys of contracts and policies are made from the classes that read them."""

import msgspec

from fedpdmc.study import schema
from fedpdmc.study.policy import Policy

MODELS = (schema.FamilyKeys, schema.PredictorKeys, schema.FileKeys)
ALONE = {schema.FamilyKeys: "other families", schema.FileKeys: "model files"}
DYNAMICS = (schema.ZigZagKeys, schema.BouncyKeys, schema.BoomerangKeys, schema.FactorisedKeys)
# A table's name, and its classes: of several, one is chosen by a key such as `type`.
TABLES = {
    "contract": {
        "the top level": (schema.ContractKeys,),
        "[columns], each column": (schema.NumberKeys, schema.CountKeys, schema.LevelKeys, schema.GroupKeys),
        "[model]": MODELS,
        "[prior]": (schema.PriorKeys,),
        "horseshoe of [prior]": (schema.HorseshoeKeys,),
        "[dynamics]": DYNAMICS,
        "[run]": (schema.RunKeys,),
        "[releases]": (schema.ReleaseKeys,),
        "[limits]": (schema.LimitKeys,),
        "[privacy]": (schema.PrivacyKeys,),
    },
    "policy": {"the top level": (Policy,)},
}


def keys_of(classes):
    """A row for each key: its name, what it may be, what it is if left out, and its description."""
    rows = {}
    for one in classes:
        info = msgspec.inspect.type_info(one)
        if info.tag_field is not None:
            tags = [f"`{other.__struct_config__.tag}`" for other in classes if other.__struct_config__.tag]
            rows.setdefault(info.tag_field, (f"one of {', '.join(tags)}", "", "says which of the other keys there are"))
        for field in info.fields:
            words = (getattr(field.type, "extra_json_schema", None) or {}).get("description", "")
            usual = "" if field.default in (None, msgspec.NODEFAULT) else f"`{field.default!r}`"
            owners = [other for other in classes if field.name in other.__struct_fields__]
            # The words of a key of one built-in loss name its families.
            if len(owners) < len(classes) and field.name != "family" and owners != [schema.PredictorKeys]:
                names = [other.__struct_config__.tag or ALONE[other] for other in owners]
                words = f"of {', '.join(names)}: {words}"
            row = schema.describe(field.type), "required" if field.required else usual, words
            rows.setdefault(field.encode_name, row)
    return [f"| `{key}` | {' | '.join(row)} |" for key, row in rows.items()]


def on_page_markdown(markdown, page, **others):
    """Put the tables in the place of the markers."""
    for name, tables in TABLES.items():
        parts = []
        for title, classes in tables.items():
            parts += [f"**{title}**", "", "| key | what it may be | if left out | meaning |", "|---|---|---|---|"]
            parts += [*keys_of(classes), ""]
        markdown = markdown.replace(f"<!-- keys of a {name} -->", "\n".join(parts))
    return markdown
