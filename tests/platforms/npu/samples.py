"""What npu-smi prints on machines of each generation, and a machine made of it."""

from __future__ import annotations

from pathlib import Path

from headrace.platforms.npu import hardware

_HEAD_910 = """\
+------------------------------------------------------------------------------------------------+
| npu-smi {driver}                   Version: {driver}                                               |
+---------------------------+---------------+----------------------------------------------------+
| NPU   Name                | Health        | Power(W)    Temp(C)           Hugepages-Usage(page)|
| Chip  Phy-ID              | Bus-Id        | AICore(%)   Memory-Usage(MB)  HBM-Usage(MB)        |
+===========================+===============+====================================================+
"""
_TAIL = """\
+---------------------------+---------------+----------------------------------------------------+
| NPU     Chip              | Process id    | Process name             | Process memory(MB)      |
+===========================+===============+====================================================+
| No running processes found in NPU 0                                                            |
+===========================+===============+====================================================+
"""
A2 = (
    _HEAD_910.format(driver="25.5.0")
    + """\
| 0     910B3               | OK            | 92.5        37                0    / 0             |
| 0                         | 0000:C1:00.0  | 0           0    / 0          3341 / 65536         |
+===========================+===============+====================================================+
| 1     910B3               | Warning       | 93.1        36                0    / 0             |
| 0                         | 0000:01:00.0  | 0           0    / 0          59807/ 65536         |
+===========================+===============+====================================================+
"""
    + _TAIL
)
A3 = (
    _HEAD_910.format(driver="25.2.1")
    + """\
| 0     Ascend910           | OK            | 161.8       36                0    / 0             |
| 0     0                   | 0000:9D:00.0  | 0           0    / 0          3122 / 65536         |
+------------------------------------------------------------------------------------------------+
| 0     Ascend910           | OK            | -           36                0    / 0             |
| 1     1                   | 0000:9F:00.0  | 0           0    / 0          2891 / 65536         |
+===========================+===============+====================================================+
"""
    + _TAIL
)
DUO = """\
+--------------------------------------------------------------------------------------------------------+
| npu-smi 24.1.0.1                                 Version: 24.1.0.1                                     |
+-------------------------------+-----------------+------------------------------------------------------+
| NPU     Name                  | Health          | Power(W)     Temp(C)           Hugepages-Usage(page) |
| Chip    Device                | Bus-Id          | AICore(%)    Memory-Usage(MB)                        |
+===============================+=================+======================================================+
| 32768   310P3                 | OK              | NA           49                0     / 0             |
| 0       0                     | 0000:01:00.0    | 0            1448 / 44278                            |
+-------------------------------+-----------------+------------------------------------------------------+
| 32768   310P3                 | OK              | NA           45                0     / 0             |
| 1       1                     | 0000:01:00.0    | 0            1511 / 43693                            |
+===============================+=================+======================================================+
"""
BOARD_A3 = """\
        NPU ID                         : 0
        Chip ID                        : 0
        Chip Name                      : Ascend910
        NPU Name                       : 9391
        Board ID                       : 0xd1
"""


class Machine:
    """Files and answers of a machine, put in place of the real ones by `at` and `smi`."""

    def __init__(self, folder: Path, table: str, board: str = BOARD_A3) -> None:
        self.folder = folder
        self.table, self.board = table, board
        self.asked: list[tuple[str, ...]] = []
        (folder / "dev").mkdir()
        (folder / "dev" / "davinci0").touch()
        (folder / "dev" / "davinci_manager").touch()

    def smi(self, *arguments: str) -> str:
        self.asked.append(arguments)
        return self.table if arguments == ("info",) else self.board

    def cann(self, version: str) -> Path:
        """A CANN of that version; its folder is what set_env.sh makes ASCEND_HOME_PATH."""
        home = self.folder / "Ascend" / "cann"
        info = home / f"{hardware.platform.machine()}-linux" / "ascend_toolkit_install.info"
        info.parent.mkdir(parents=True, exist_ok=True)
        info.write_text(f"package_name=Ascend-cann-toolkit\nversion={version}\narch=x86_64\n")
        return home
