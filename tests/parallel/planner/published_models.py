"""AlexNet, VGG-16 and ResNet-50 as torchvision has them, for their published operations."""

from __future__ import annotations

from torch import nn


def alexnet() -> nn.Module:
    def conv(*args, **kwargs):
        return nn.Sequential(nn.Conv2d(*args, **kwargs), nn.ReLU())

    pool = nn.MaxPool2d(3, 2)
    return nn.Sequential(
        *(conv(3, 64, 11, stride=4, padding=2), pool, conv(64, 192, 5, padding=2), pool),
        *(conv(192, 384, 3, padding=1), conv(384, 256, 3, padding=1), conv(256, 256, 3, padding=1)),
        *(pool, nn.Flatten(), nn.Linear(256 * 36, 4096), nn.ReLU()),
        *(nn.Linear(4096, 4096), nn.ReLU(), nn.Linear(4096, 1000)),
    )


def vgg16() -> nn.Module:
    layers: list[nn.Module] = []
    channels = 3
    for width, count in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(count):
            layers += [nn.Conv2d(channels, width, 3, padding=1), nn.ReLU()]
            channels = width
        layers.append(nn.MaxPool2d(2))
    head = [nn.Linear(512 * 49, 4096), nn.ReLU(), nn.Linear(4096, 4096), nn.ReLU()]
    return nn.Sequential(*layers, nn.Flatten(), *head, nn.Linear(4096, 1000))


class Bottleneck(nn.Module):
    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.layers = nn.Sequential(
            *(nn.Conv2d(channels, width, 1, bias=False), nn.BatchNorm2d(width), nn.ReLU()),
            nn.Conv2d(width, width, 3, stride=stride, padding=1, bias=False),
            *(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, 4 * width, 1, bias=False)),
            nn.BatchNorm2d(4 * width),
        )
        self.shortcut = nn.Identity()
        if channels != 4 * width:
            self.shortcut = nn.Conv2d(channels, 4 * width, 1, stride=stride, bias=False)

    def forward(self, x):
        return (self.layers(x) + self.shortcut(x)).relu()


def resnet50() -> nn.Module:
    layers: list[nn.Module] = [nn.Conv2d(3, 64, 7, stride=2, padding=3, bias=False)]
    layers += [nn.BatchNorm2d(64), nn.ReLU(), nn.MaxPool2d(3, 2, padding=1)]
    channels = 64
    for width, count, stride in ((64, 3, 1), (128, 4, 2), (256, 6, 2), (512, 3, 2)):
        for i in range(count):
            layers.append(Bottleneck(channels, width, stride if i == 0 else 1))
            channels = 4 * width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(2048, 1000))
