"""A Flower grid in this process: the package's own ServerApp and ClientApp, and between them messages as Flower's bytes."""

import uuid

from flwr.app import Context, Error, Message, RecordDict
from flwr.common.serde import ProtoMessage, message_from_proto, message_to_proto
from flwr.serverapp import Grid
from flwr.supercore.task_identity import TaskIdentity

from fedpdmc.federation.flower import client_app


class GridHere(Grid):
    """Nodes that answer at once; each message is a new start of its ClientApp, as under a SuperNode.

    Parameters
    ----------
    nodes : dict
        The configuration of each node.
    """

    def __init__(self, nodes):
        self.nodes = nodes
        # What `flwr run` would set.
        TaskIdentity.task_id = TaskIdentity.run_id = TaskIdentity.node_id = 1

    def get_node_ids(self):
        return list(self.nodes)

    def send_and_receive(self, messages, *, timeout=None):
        return [self._carried(self._answer(self._carried(message))) for message in messages]

    def _carried(self, message):
        message.metadata.__dict__["_message_id"] = message.metadata.message_id or str(uuid.uuid4())
        return message_from_proto(ProtoMessage.FromString(message_to_proto(message).SerializeToString()))

    def _answer(self, message):
        node = message.metadata.dst_node_id
        try:
            return client_app(message, Context(1, node, self.nodes[node], RecordDict(), {}))
        except Exception as error:  # noqa: BLE001
            return Message(Error(code=1, reason=str(error)), reply_to=message)

    def set_run(self, *_):
        raise NotImplementedError

    run = property(set_run)
    create_message = push_messages = pull_messages = set_run
