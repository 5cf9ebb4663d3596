"""Wire type of `kv_transfer_params` in answers."""

import msgspec


class KvTransfer(msgspec.Struct):
    """What to send with the prompt to the server that continues it. The blocks are in the folder that both share."""

    do_remote_prefill: bool = True
    do_remote_decode: bool = False
    remote_engine_id: None = None
    remote_block_ids: None = None
    remote_host: None = None
    remote_port: None = None
