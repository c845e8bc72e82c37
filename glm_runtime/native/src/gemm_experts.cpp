// Routed experts: rows sorted by expert, gate_up with silu, down, and each row's weighed sum in the order of its own list.
#include <cstring>
#include <vector>

#include "gemm_block.hpp"

#ifdef GLM_SUPPORTED
namespace glm {
namespace {

constexpr int64_t kSumColumns = 512;  // of one row, summed as one piece of work

// Assignments (row, place in its list) in the order of experts; what was chosen by nobody does not appear, nor what is elsewhere (< 0).
struct Routes {
    std::vector<int64_t> experts, begins;  // the experts that were chosen, and where their assignments begin; one more begin at the end
    std::vector<int64_t> rows, places;     // sorted place -> row; assignment -> sorted place, or -1

    void sort(const int64_t* chosen, int64_t num_rows, int64_t num_chosen, int64_t num_experts) {
        const int64_t count = num_rows * num_chosen;
        std::vector<int64_t>& next = begins;
        next.assign(size_t(num_experts) + 1, 0);
        for (int64_t i = 0; i < count; ++i)
            if (chosen[i] >= 0) ++next[size_t(chosen[i]) + 1];
        experts.clear();
        for (int64_t e = 0; e < num_experts; ++e) {
            if (next[size_t(e) + 1] > 0) experts.push_back(e);
            next[size_t(e) + 1] += next[size_t(e)];
        }
        std::vector<int64_t> hit_begins;
        for (int64_t e : experts) hit_begins.push_back(next[size_t(e)]);
        const int64_t num_here = next[size_t(num_experts)];
        rows.resize(size_t(num_here));
        places.assign(size_t(count), -1);
        for (int64_t i = 0; i < count; ++i) {
            if (chosen[i] < 0) continue;
            const int64_t place = next[size_t(chosen[i])]++;
            places[size_t(i)] = place;
            rows[size_t(place)] = i / num_chosen;
        }
        begins = std::move(hit_begins);
        begins.push_back(num_here);
    }
};

struct Piece {
    int64_t expert, begin;
    Block block;
};

// All blocks of one product of all chosen experts.
void list_pieces(const Routes& routes, const Matrix& matrix, int64_t threads, std::vector<Piece>& pieces) {
    pieces.clear();
    const int64_t num_hits = int64_t(routes.experts.size());
    for (int64_t hit = 0; hit < num_hits; ++hit) {
        const int64_t begin = routes.begins[size_t(hit)], rows = routes.begins[size_t(hit) + 1] - begin;
        Blocks blocks = choose_blocks(rows, matrix, num_hits, threads);
        const int64_t count = blocks.row_blocks() * blocks.panel_blocks();
        for (int64_t work = 0; work < count; ++work) pieces.push_back({routes.experts[size_t(hit)], begin, blocks.at(work)});
    }
}

void multiply_piece(const Piece& piece, const Matrix& stack, const char* x, Target target) {
    const char* rows = x + piece.begin * stack.inner * x_bytes(stack.kind);
    target.out += piece.begin * target.stride * (target.is_bf16 ? 2 : 4);
    multiply_block({rows, stack.inner}, stack.item(piece.expert), piece.block, target);
}

// out[begin, end) = sum over j of gates[j] * products[places[j]], in the order of j.
void sum_row(
    float* out, const float* products, const float* gates, const int64_t* places, int64_t num_chosen, int64_t hidden, int64_t begin,
    int64_t end) {
    for (int64_t column = begin; column < end; column += kLanes) {
        const __mmask16 lanes = first_lanes(std::min<int64_t>(kLanes, end - column));
        vec total = _mm512_setzero_ps();
        for (int64_t j = 0; j < num_chosen; ++j) {
            if (places[j] < 0) continue;
            total = _mm512_fmadd_ps(_mm512_set1_ps(gates[j]), _mm512_maskz_loadu_ps(lanes, products + places[j] * hidden + column), total);
        }
        _mm512_mask_storeu_ps(out + column, lanes, total);
    }
}

}  // namespace
}  // namespace glm

// x: [T, H], rows x_stride apart. chosen and gates: [T, k], contiguous; a negative expert is elsewhere and adds nothing.
// gate_up: E packed gated matrices 2 I x H; down: E packed H x I.
// sorted [T k, H] and gated [T k, I] of x's dtype and products [T k, H] fp32 are scratch. out: [T, H] fp32, contiguous.
extern "C" void glm_experts(
    const void* x, int64_t x_stride, const int64_t* chosen, const float* gates, int64_t num_rows, int64_t num_chosen,
    const void* gate_up, int64_t gate_up_kind, const void* down, int64_t down_kind, int64_t num_experts, int64_t hidden, int64_t inner,
    void* sorted, void* gated, float* products, float* out, int64_t max_threads) {
    using namespace glm;
    if (num_rows == 0) return;
    const Matrix first{static_cast<const char*>(gate_up), Kind(gate_up_kind), 2 * inner, hidden};
    const Matrix second{static_cast<const char*>(down), Kind(down_kind), hidden, inner};
    Routes routes;
    routes.sort(chosen, num_rows, num_chosen, num_experts);
    const int64_t assignments = int64_t(routes.rows.size()), threads = useful_threads(max_threads, assignments * hidden * inner);
    const int64_t size = x_bytes(first.kind), sums_each = (hidden + kSumColumns - 1) / kSumColumns;
    const Target inner_target{static_cast<char*>(gated), inner, size == 2, true};
    const Target product_target{reinterpret_cast<char*>(products), hidden, false, false};
    std::vector<Piece> gate_up_pieces, down_pieces;
    list_pieces(routes, first, threads, gate_up_pieces);
    list_pieces(routes, second, threads, down_pieces);
    const int64_t num_gate_up = int64_t(gate_up_pieces.size()), num_down = int64_t(down_pieces.size());
#pragma omp parallel num_threads(threads) if (threads > 1)
    {
#pragma omp for schedule(static)
        for (int64_t place = 0; place < assignments; ++place)
            std::memcpy(static_cast<char*>(sorted) + place * hidden * size,
                        static_cast<const char*>(x) + routes.rows[size_t(place)] * x_stride * size, size_t(hidden * size));
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_gate_up; ++i)
            multiply_piece(gate_up_pieces[size_t(i)], first, static_cast<const char*>(sorted), inner_target);
#pragma omp for schedule(dynamic)
        for (int64_t i = 0; i < num_down; ++i)
            multiply_piece(down_pieces[size_t(i)], second, static_cast<const char*>(gated), product_target);
#pragma omp for schedule(static)
        for (int64_t piece = 0; piece < num_rows * sums_each; ++piece) {
            const int64_t row = piece / sums_each, begin = piece % sums_each * kSumColumns;
            const int64_t* places = routes.places.data() + row * num_chosen;
            const int64_t end = std::min(begin + kSumColumns, hidden);
            sum_row(out + row * hidden, products, gates + row * num_chosen, places, num_chosen, hidden, begin, end);
        }
    }
}

#endif
