"""What the C library and shells print in the language of the user, in English."""

from __future__ import annotations

import re

_TRANSLATED = {
    "Cannot allocate memory": (
        "无法分配内存",
        "無法配置記憶體",
        "メモリを確保できません",
        "메모리를 할당할 수 없습니다",
        "Невозможно выделить память",
        "Не удалось выделить память",
        "Nicht genügend Hauptspeicher verfügbar",
        "Impossible d'allouer de la mémoire",
        "Ne peut allouer de la mémoire",
        "No se pudo asignar memoria",
        "Impossibile allocare memoria",
        "Não foi possível alocar memória",
        "Não é possível alocar memória",
    ),
    "No space left on device": (
        "设备上没有空间",
        "裝置上已無多餘空間",
        "デバイスに空き領域がありません",
        "장치에 남은 공간이 없음",
        "На устройстве не осталось свободного места",
        "Auf dem Gerät ist kein Speicherplatz mehr verfügbar",
        "Aucun espace disponible sur le périphérique",
        "No queda espacio en el dispositivo",
        "Não há espaço disponível no dispositivo",
        "Spazio esaurito sul device",
    ),
    "Killed": (
        "已杀死",
        "已砍掉",
        "強制終了",
        "죽었음",
        "Убито",
        "Getötet",
        "Processus arrêté",
        "Terminado (killed)",
        "Ucciso",
        "Unicestwiony",
    ),
    "Segmentation fault": (
        "段错误",
        "程式記憶體區段錯誤",
        "Ошибка сегментирования",
        "Speicherzugriffsfehler",
        "Erreur de segmentation",
        "Violación de segmento",
        "Falha de segmentação",
        "Errore di segmentazione",
    ),
    "Bus error": (
        "总线错误",
        "Bus-Zugriffsfehler",
        "Erreur du bus",
        "Errore di bus",
    ),
}
_IN_ENGLISH = {words: english for english, others in _TRANSLATED.items() for words in others}
_FOREIGN = re.compile(
    "|".join(
        # A word as common as "killed" is the shell's or the compiler's only at these places.
        re.escape(words) + (r"(?=[*_`]{0,3}$| signal terminated)" if english == "Killed" else "")
        for words, english in _IN_ENGLISH.items()
    )
)


def in_english(text: str) -> str:
    """The line with these words in English."""
    return _FOREIGN.sub(lambda match: _IN_ENGLISH[match[0]], text)
