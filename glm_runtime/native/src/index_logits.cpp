// Index scores and what they select, over paged keys. Contracts: ops/index_logits and ops/index_select, reference.py.
//
// A score is one chain of products over the key's width, in ascending order, and one over the heads: it depends on its row and its
// key alone. Keys of a tile are decoded once for all rows of a sequence that are computed together.
#include "index_keys.hpp"
#include "topk.hpp"

#ifdef GLM_SUPPORTED
#include <vector>

namespace {
using namespace glm;

constexpr size_t kRowsTogether = 16;

// A row to score: where its scores go, with room for whole tiles, and how many keys it sees.
struct Row {
    int64_t number;
    float* scores;
    int64_t visible;
};

// rows[first, first + count) of one sequence share decoded tiles of its first `context` keys.
struct Group {
    size_t first, count;
    int64_t context;
    const int64_t* block_table;
};

struct Item {
    size_t group;
    int64_t first_key;
};

void add_row(std::vector<Group>& groups, std::vector<Row>& rows, const Row& row, const int64_t* block_table) {
    if (groups.empty() || groups.back().block_table != block_table || groups.back().count == kRowsTogether)
        groups.push_back({rows.size(), 0, 0, block_table});
    groups.back().count += 1;
    groups.back().context = larger(groups.back().context, row.visible);
    rows.push_back(row);
}

template <class Number>
void score_rows(const IndexQueries& queries, const IndexKeys& keys, const std::vector<Group>& groups, const std::vector<Row>& rows) {
    thread_local Scratch query_memory;
    std::vector<Item> items;
    for (size_t group = 0; group < groups.size(); ++group)
        for (int64_t key = 0; key < groups[group].context; key += kTileKeys) items.push_back({group, key});
    const int64_t query_numbers = queries.padded_heads() * keys.padded_width();
    Number* packed = query_memory.take<Number>(query_numbers * int64_t(rows.size()));
#pragma omp parallel
    {
        thread_local Scratch tile_memory;
        KeyTile<Number> tile(keys, tile_memory.take<uint8_t>(KeyTile<Number>::bytes(keys)));
#pragma omp for schedule(static)
        for (size_t row = 0; row < rows.size(); ++row) pack(queries, rows[row].number, packed + int64_t(row) * query_numbers);
#pragma omp for schedule(dynamic)
        for (size_t number = 0; number < items.size(); ++number) {
            const int64_t key = items[number].first_key;
            const Group& group = groups[items[number].group];
            tile.load(group.block_table, key, smaller(kTileKeys, group.context - key));
            for (size_t row = group.first; row < group.first + group.count; ++row)
                if (key < rows[row].visible)
                    tile.score(packed + int64_t(row) * query_numbers, queries.weights + rows[row].number * queries.heads, queries.heads,
                               rows[row].scores + key);
        }
    }
}

void score(const IndexQueries& queries, const IndexKeys& keys, const std::vector<Group>& groups, const std::vector<Row>& rows) {
    if (has_bf16_products(queries, keys))
        score_rows<bf16>(queries, keys, groups, rows);
    else
        score_rows<float>(queries, keys, groups, rows);
}

}  // namespace

// queries [sequences, rows_each, heads, width]; weights [sequences, rows_each, heads]; block_tables [sequences, table_width];
// positions [sequences, rows_each]; scores [sequences, rows_each, context], context = table_width * block_size, a multiple of 64.
extern "C" void glm_index_logits(const void* queries, int64_t are_queries_bf16, const float* weights, int64_t sequences, int64_t rows_each,
                             int64_t heads, int64_t width, const void* numbers, int64_t block_bytes, int64_t token_bytes,
                             const void* scales,
                             int64_t scale_block_bytes, int64_t scale_token_bytes, int64_t kind, int64_t block_size,
                             const int64_t* block_tables, int64_t table_width, const int64_t* positions, float* scores) {
    const IndexKeys keys{static_cast<const uint8_t*>(numbers), static_cast<const uint8_t*>(scales), block_bytes, token_bytes,
                         scale_block_bytes, scale_token_bytes, block_size, width, RowKind(kind)};
    const IndexQueries all{queries, weights, are_queries_bf16 != 0, heads, width};
    const int64_t context = table_width * block_size;
    std::vector<Group> groups;
    std::vector<Row> rows;
    for (int64_t row = 0; row < sequences * rows_each; ++row)
        add_row(groups, rows, {row, scores + row * context, positions[row] + 1}, block_tables + row / rows_each * table_width);
    score(all, keys, groups, rows);
#pragma omp parallel for
    for (size_t row = 0; row < rows.size(); ++row)
        for (int64_t key = rows[row].visible; key < context; ++key) rows[row].scores[key] = -INFINITY;
}

// Rows as a step has them: queries [rows, heads, width], weights [rows, heads], row_sequences and visible [rows], block_tables
// [sequences, table_width]; lists [rows, list_width]. A row that sees more than topk tokens (then list_width = topk) is scored; the
// others list all they see. scratch_bytes bounds the scores of the rows that are computed together; one row is computed at least.
// best [rows, list_width] or null: what the listed tokens scored. With it every row that sees a token is scored.
extern "C" void glm_index_select(const void* queries, int64_t are_queries_bf16, const float* weights, int64_t num_rows, int64_t heads,
                             int64_t width, const void* numbers, int64_t block_bytes, int64_t token_bytes, const void* scales,
                             int64_t scale_block_bytes, int64_t scale_token_bytes, int64_t kind, int64_t block_size,
                             const int64_t* block_tables, int64_t table_width, const int64_t* row_sequences, const int64_t* visible,
                             int64_t topk, int64_t list_width, int64_t scratch_bytes, int64_t* lists, float* best) {
    const IndexKeys keys{static_cast<const uint8_t*>(numbers), static_cast<const uint8_t*>(scales), block_bytes, token_bytes,
                         scale_block_bytes, scale_token_bytes, block_size, width, RowKind(kind)};
    const IndexQueries all{queries, weights, are_queries_bf16 != 0, heads, width};
    thread_local Scratch score_memory;
    std::vector<Group> groups;
    std::vector<Row> rows;
    for (int64_t next = 0; next < num_rows;) {
        groups.clear(), rows.clear();
        int64_t floats = 0;
        for (; next < num_rows; ++next) {
            if (visible[next] <= topk) {
                list_all(visible[next], list_width, lists + next * list_width);
                if (best == nullptr) continue;
                if (visible[next] == 0) {
                    score_list(nullptr, lists + next * list_width, list_width, best + next * list_width);
                    continue;
                }
            }
            const int64_t room = round_up(visible[next], kTileKeys);
            if (!rows.empty() && (floats + room) * 4 > scratch_bytes) break;
            add_row(groups, rows, {next, nullptr, visible[next]}, block_tables + row_sequences[next] * table_width);
            floats += room;
        }
        if (rows.empty()) break;
        float* scores = score_memory.take<float>(floats);
        for (Row& row : rows) {
            row.scores = scores;
            scores += round_up(row.visible, kTileKeys);
        }
        score(all, keys, groups, rows);
#pragma omp parallel for schedule(dynamic)
        for (size_t row = 0; row < rows.size(); ++row) {
            uint32_t* ranks = reinterpret_cast<uint32_t*>(rows[row].scores);
            rank_scores(rows[row].scores, rows[row].visible, ranks);
            int64_t* list = lists + rows[row].number * list_width;
            if (rows[row].visible > topk) list_best(ranks, rows[row].visible, topk, list);
            if (best != nullptr) score_list(ranks, list, list_width, best + rows[row].number * list_width);
        }
    }
}
#endif
