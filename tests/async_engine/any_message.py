"""Messages of any type, with any of their fields set to anything."""

import functools

from google.protobuf import message_factory
from google.protobuf.descriptor_pb2 import FieldDescriptorProto
from hypothesis import strategies as st

WORDS = st.one_of(
    st.text(max_size=6), st.sampled_from(["{}", "[]", '{"n": 2}', "user", "auto", "text_input", "BYTES", "\ud7ff\x00"])
)
SCALARS = {
    "TYPE_STRING": WORDS,
    "TYPE_BYTES": st.binary(max_size=6),
    "TYPE_BOOL": st.booleans(),
    "TYPE_FLOAT": st.floats(width=32),
    "TYPE_DOUBLE": st.floats(),
    "TYPE_INT32": st.integers(-(2**31), 2**31 - 1),
    "TYPE_INT64": st.integers(-(2**63), 2**63 - 1),
    "TYPE_UINT32": st.one_of(st.integers(0, 3), st.integers(0, 2**32 - 1)),
    "TYPE_UINT64": st.integers(0, 2**64 - 1),
}


def values_of(field):
    if field.message_type is not None:
        return messages_of(field.message_type)
    return SCALARS[FieldDescriptorProto.Type.Name(field.type)]


@functools.cache
def messages_of(descriptor):
    """Messages of a type with any of its fields set to anything."""
    make = message_factory.GetMessageClass(descriptor)
    fields = {}
    for field in descriptor.fields:
        entry = field.message_type
        if entry is not None and entry.GetOptions().map_entry:
            key, value = entry.fields
            fields[field.name] = st.dictionaries(values_of(key), values_of(value), max_size=2)
        elif field.is_repeated:
            fields[field.name] = st.lists(values_of(field), max_size=3)
        else:
            fields[field.name] = values_of(field)

    def build(given):
        message = make()
        for name, value in given.items():
            oneof = descriptor.fields_by_name[name].containing_oneof
            if oneof is None or message.WhichOneof(oneof.name) is None:
                message.MergeFrom(make(**{name: value}))
        return message

    if not fields:
        return st.builds(make)
    # Few at a time: the first that is wrong hides all others.
    chosen = st.lists(st.sampled_from(list(fields)), max_size=3, unique=True)
    return chosen.flatmap(lambda names: st.fixed_dictionaries({name: fields[name] for name in names})).map(build)
