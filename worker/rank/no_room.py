"""A step that found no room on its device."""


class NoRoomError(RuntimeError):
    """The device's memory ran out in a step: what was launched of it counts for nothing.

    torch raises it before it launches what needs the room, so the device and the process are whole.
    """
