"""Models as their publishers write them: classes with a `forward`, none of them an `nn.Sequential`.

    classic    LeNet, VGG, ResNet with basic blocks and with bottlenecks, a net with two inputs
    dense      DenseNet
    mobile     MobileNetV2, and a small net of depthwise convolutions
    modern     ConvNeXt, MLP-Mixer, ViT and BERT of `transformers`
    sequences  GRU and LSTM classifiers and taggers, a character transformer
    pixels     U-Nets, with and without long skips

Sizes are arguments: tests take small ones. The structure is that of the publications; no weights.
"""
