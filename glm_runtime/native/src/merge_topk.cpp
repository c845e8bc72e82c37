// The best of several ranks' best. Contract: ops/merge_topk/reference.py.
#include "topk.hpp"

#ifdef GLM_SUPPORTED
#include <algorithm>
#include <vector>

namespace {

// Entries of one row that have a token.
struct Entries {
    std::vector<uint32_t> ranks;
    std::vector<int64_t> tokens;
    size_t count = 0;

    void add(const float* scores, const int64_t* given, int64_t size) {
        uint32_t* own = ranks.data() + count;
        glm::rank_scores(scores, size, own);
        size_t kept = 0;
        for (int64_t i = 0; i < size; ++i) {
            tokens[count + kept] = given[i];
            own[kept] = own[i];
            kept += given[i] >= 0;
        }
        count += kept;
    }
};

// list[k] = the tokens of the k best of at least k entries, in any order.
void choose(Entries& entries, int64_t k, std::vector<int64_t>& ties, int64_t* list) {
    const uint32_t threshold = glm::find_threshold(entries.ranks.data(), int64_t(entries.count), k);
    int64_t listed = 0;
    ties.clear();
    for (size_t i = 0; i < entries.count; ++i) {
        if (entries.ranks[i] > threshold)
            list[listed++] = entries.tokens[i];
        else if (entries.ranks[i] == threshold)
            ties.push_back(entries.tokens[i]);
    }
    const auto wanted = ties.begin() + (k - listed);
    if (wanted != ties.end()) std::nth_element(ties.begin(), wanted, ties.end());
    std::copy(ties.begin(), wanted, list + listed);
}

}  // namespace

// scores, tokens [parts, rows, width]; lists [rows, k].
extern "C" void glm_merge_topk(const float* scores, const int64_t* tokens, int64_t parts, int64_t num_rows, int64_t width, int64_t k,
                               int64_t* lists) {
#pragma omp parallel if (parts * num_rows * width > 4096)
    {
        thread_local Entries entries;
        thread_local std::vector<int64_t> ties;
        entries.ranks.resize(size_t(parts * width + 1));
        entries.tokens.resize(size_t(parts * width + 1));
#pragma omp for schedule(static)
        for (int64_t row = 0; row < num_rows; ++row) {
            entries.count = 0;
            for (int64_t part = 0; part < parts; ++part) {
                const int64_t first = (part * num_rows + row) * width;
                entries.add(scores + first, tokens + first, width);
            }
            int64_t* list = lists + row * k;
            const int64_t count = std::min(k, int64_t(entries.count));
            if (int64_t(entries.count) > k)
                choose(entries, k, ties, list);
            else
                std::copy(entries.tokens.begin(), entries.tokens.begin() + count, list);
            std::sort(list, list + count);
            std::fill(list + count, list + k, -1);
        }
    }
}
#endif
