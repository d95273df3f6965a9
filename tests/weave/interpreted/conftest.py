from tests.ops.interpreted.conftest import *  # noqa: F403
