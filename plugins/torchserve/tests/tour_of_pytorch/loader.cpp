// Runs the tour's TorchScript file without Python: loader MODEL INPUTS COUNT, one line per answer.
#include <torch/script.h>

#include <cstdlib>
#include <fstream>
#include <iomanip>
#include <iostream>
#include <vector>

int main(int argc, const char* argv[]) {
    if (argc != 4) return 2;
    torch::NoGradGuard no_grad;
    torch::jit::Module model = torch::jit::load(argv[1]);
    const int64_t count = std::atoll(argv[3]);
    std::vector<float> pixels(count * 28 * 28);
    std::ifstream file(argv[2], std::ios::binary);
    if (!file.read(reinterpret_cast<char*>(pixels.data()), pixels.size() * sizeof(float))) return 1;
    torch::Tensor images = torch::from_blob(pixels.data(), {count, 1, 28, 28});
    torch::Tensor answers = model.forward({images}).toTensor().contiguous();
    std::cout << std::setprecision(9);
    for (int64_t row = 0; row < count; ++row) {
        for (int64_t k = 0; k < answers.size(1); ++k) std::cout << answers[row][k].item<float>() << ' ';
        std::cout << '\n';
    }
}
